#include "session.h"

#include <sched.h>
#include <smp/error.h>

#include <array>
#include <mutex>
#include <string_view>

namespace smp::mpi {
namespace {

struct Session {
  std::mutex mutex;
  int num_users = 0;
  bool initialised_here = false;
  bool failed = false;
};

Session& session() {
  static Session instance;
  return instance;
}

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw_failure("{}: {}", call, std::string_view(text.data(), static_cast<std::size_t>(length)));
}

void enter() {
  Session& state = session();
  const std::lock_guard lock(state.mutex);
  int finalized = 0;
  check(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) {
    throw_failure("MPI has been finalized in this process, and can be initialised only once");
  }
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  int provided = MPI_THREAD_SINGLE;
  if (initialised != 0) {
    check(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    state.initialised_here = true;
  }
  // All our calls are made under one lock, by several threads.
  if (provided < MPI_THREAD_SERIALIZED) {
    throw_usage(
        "MPI was initialised with thread support level {}: at least {} (MPI_THREAD_SERIALIZED) is needed. Initialise "
        "it "
        "with MPI_THREAD_MULTIPLE, as mpi4py does by default, or leave it to this library.",
        provided, static_cast<int>(MPI_THREAD_SERIALIZED));
  }
  ++state.num_users;
}

void leave(bool clean) {
  Session& state = session();
  const std::lock_guard lock(state.mutex);
  --state.num_users;
  state.failed = state.failed || !clean;
  if (state.num_users == 0 && state.initialised_here && !state.failed) {
    MPI_Finalize();
  }
}

bool is_crowded(MPI_Comm comm) {
  MPI_Comm host = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  int num_ranks = 0;
  check(MPI_Comm_size(host, &num_ranks), "MPI_Comm_size");
  // Launchers bind each rank to cores of its own: what they may use together counts.
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof(cores), &cores);
  check(MPI_Allreduce(MPI_IN_PLACE, &cores, sizeof(cores), MPI_BYTE, MPI_BOR, host), "MPI_Allreduce");
  check(MPI_Comm_free(&host), "MPI_Comm_free");
  return num_ranks > CPU_COUNT(&cores);
}

}  // namespace smp::mpi
