// Latency and bandwidth of the MPI transport against plain MPI, in one run of two processes:
//
//   mpirun -np 2 transport_benchmark
//
// For each payload size rank 0 sends to rank 1, which sends it back. Plain MPI polls (MPI_Irecv, MPI_Test, sched_yield)
// like the transport, into one buffer that it reuses; the transport receives into a fresh tensor each time, from a
// thread. "Ratio" is the time of the transport over that of plain MPI. Both alternate, and the medians count.

#include <mpi.h>
#include <sched.h>
#include <smp/transport.h>

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNumBlocks = 15;

void wait(MPI_Request& request) {
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), done == 0) {
    sched_yield();
  }
}

void plain_round_trip(int rank, std::vector<char>& buffer) {
  const int peer = 1 - rank;
  const int size_bytes = static_cast<int>(buffer.size());
  MPI_Request request = MPI_REQUEST_NULL;
  for (int turn = 0; turn < 2; ++turn) {
    if (turn == rank) {
      MPI_Isend(buffer.data(), size_bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &request);
    } else {
      MPI_Irecv(buffer.data(), size_bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &request);
    }
    wait(request);
  }
}

/// Both ranks answer in their receivers, as the engine does, while their main threads sleep.
class Rally {
 public:
  explicit Rally(smp::Transport& transport) : transport_(transport) {
    transport.set_receiver(smp::kEngineChannel, [this](int source, smp::Message message) {
      const bool last = --num_to_receive_ == 0;
      if (transport_.rank() == 1 || !last) {
        transport_.send(source, std::move(message));
      }
      if (last) {
        const std::lock_guard lock(mutex_);
        done_ = true;
        ended_.notify_all();
      }
    });
  }
  ~Rally() { transport_.set_receiver(smp::kEngineChannel, {}); }

  void start(int num_rounds) {
    num_to_receive_ = num_rounds;
    done_ = false;
  }

  void play(const at::Tensor& payload) {
    if (transport_.rank() == 0) {
      transport_.send(1, {smp::kEngineChannel, "a header", payload});
    }
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return done_; });
  }

 private:
  smp::Transport& transport_;
  std::atomic<int> num_to_receive_{0};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
};

double one_way_us(int num_rounds, const std::function<void()>& play) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = Clock::now();
  play();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / num_rounds / 2;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void run(smp::Transport& transport) {
  Rally rally(transport);
  const bool prints = transport.rank() == 0;
  if (prints) {
    std::printf("%10s %14s %14s %14s %14s %7s\n", "bytes", "plain us", "transport us", "plain GB/s", "transport GB/s",
                "ratio");
  }
  for (const int size_bytes :
       {8, 1 << 10, 4 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}) {
    const int num_rounds = std::clamp((8 << 20) / size_bytes, 2, 300);
    std::vector<char> buffer(size_bytes, 1);
    const at::Tensor payload = at::detail::empty_cpu({size_bytes}, at::kByte);
    std::memset(payload.data_ptr(), 1, size_bytes);
    std::vector<double> plain_us;
    std::vector<double> transport_us;
    for (int block = 0; block < kNumBlocks; ++block) {
      plain_us.push_back(one_way_us(num_rounds, [&] {
        for (int round = 0; round < num_rounds; ++round) {
          plain_round_trip(transport.rank(), buffer);
        }
      }));
      rally.start(num_rounds);
      transport_us.push_back(one_way_us(num_rounds, [&] { rally.play(payload); }));
    }
    if (prints) {
      const double plain = median(plain_us);
      const double ours = median(transport_us);
      std::printf("%10d %14.2f %14.2f %14.2f %14.2f %7.2f\n", size_bytes, plain, ours, size_bytes / plain / 1e3,
                  size_bytes / ours / 1e3, ours / plain);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main() {
  const auto transport = smp::make_mpi_transport();
  if (transport->size() != 2) {
    std::fprintf(stderr, "This benchmark needs two processes: mpirun -np 2 transport_benchmark\n");
    transport->close();
    return 1;
  }
  run(*transport);
  transport->close();
  return 0;
}
