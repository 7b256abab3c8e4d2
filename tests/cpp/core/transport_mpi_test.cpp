// Runs under mpirun with two or more processes; each test runs in all of them.

#include <mpi.h>

#include <cstdio>

#include "../../../core/src/transport/mpi/pacing.h"
#include "transport_conformance.h"

namespace smp::testing {
namespace {

struct MpiBackend {
  static void run(const std::function<void(Transport&)>& body) {
    const auto transport = make_mpi_transport();
    try {
      body(*transport);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << transport->rank() << ": " << error.what();
      transport->abandon();
    }
    transport->close();
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Mpi, TransportConformance, MpiBackend);

TEST(MpiTransport, knows_its_place) {
  MpiBackend::run([](Transport& transport) {
    int rank = -1;
    int size = -1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    EXPECT_EQ(transport.rank(), rank);
    EXPECT_EQ(transport.size(), size);
  });
}

TEST(MpiTransport, never_finalizes_an_mpi_that_others_started) {
  for (int i = 0; i < 3; ++i) {
    MpiBackend::run([](Transport&) {});
    int finalized = -1;
    MPI_Finalized(&finalized);
    EXPECT_EQ(finalized, 0);
  }
}

TEST(MpiTransport, several_live_beside_each_other_and_beside_other_mpi_traffic) {
  MpiBackend::run([](Transport& first) {
    MpiBackend::run([&](Transport& second) {
      Inbox first_inbox(first);
      Inbox second_inbox(second);
      second.send(next_rank(second), make_message("second"));
      first.send(next_rank(first), make_message("first"));
      int sum = 0;
      const int one = 1;
      MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
      EXPECT_EQ(sum, first.size());
      EXPECT_EQ(first_inbox.take(previous_rank(first)).header, "first");
      EXPECT_EQ(second_inbox.take(previous_rank(second)).header, "second");
    });
  });
}

TEST(MpiTransport, a_quiet_rank_answers_within_milliseconds) {
  MpiBackend::run([](Transport& transport) {
    Inbox inbox(transport);
    meet(transport, inbox);
    std::this_thread::sleep_for(1200ms);
    const auto start = std::chrono::steady_clock::now();
    meet(transport, inbox);
    // The bound is loose for a loaded machine; a doze takes 0.5 ms at most.
    EXPECT_LT(std::chrono::steady_clock::now() - start, 200ms);
  });
}

TEST(MpiTransport, cannot_be_held) {
  MpiBackend::run([](Transport& transport) { EXPECT_THROW(hold_local_delivery(transport, true), UsageError); });
}

TEST(Pacing, depends_on_what_the_rank_does) {
  using std::chrono::microseconds;
  struct Case {
    mpi::Pace pace;
    microseconds expected;
  };
  const Case cases[] = {
      {{.busy = true}, microseconds(3000)},
      {{.busy = true, .transferring = true}, microseconds(50)},
      {{.busy = true, .quiet_for = 10s}, microseconds(3000)},
      {{.quiet_for = 0s}, microseconds(0)},
      {{.transferring = true}, microseconds(0)},
      {{.crowded = true}, microseconds(20)},
      {{.quiet_for = microseconds(999)}, microseconds(0)},
      {{.quiet_for = 1ms}, microseconds(20)},
      {{.quiet_for = 11ms}, microseconds(120)},
      {{.quiet_for = 10s}, microseconds(500)},
      {{.crowded = true, .quiet_for = 10s}, microseconds(500)},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(pause_before_look(each.pace), each.expected)
        << "busy " << each.pace.busy << ", crowded " << each.pace.crowded << ", transferring " << each.pace.transferring
        << ", quiet for " << each.pace.quiet_for.count() << " us";
  }
}

}  // namespace
}  // namespace smp::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size < 2 && !GTEST_FLAG_GET(list_tests)) {
    std::fprintf(stderr, "These tests need two or more processes: mpirun -np 2 %s\n", argv[0]);
    MPI_Finalize();
    return 1;
  }
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
