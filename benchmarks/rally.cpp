// Round trips of a payload between two ranks, timed in C++: over a transport of the library, and over plain MPI. For
// transport.py.

#include <mpi.h>
#include <pybind11/pybind11.h>
#include <sched.h>
#include <smp/transport.h>

#include <ATen/EmptyTensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace py = pybind11;

namespace {

using Clock = std::chrono::steady_clock;

double one_way_us(Clock::time_point start, int num_rounds) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / num_rounds / 2;
}

/// Both ranks answer in their receivers, as the engine does, while their main threads sleep.
class Rally {
 public:
  explicit Rally(std::shared_ptr<smp::Transport> transport) : transport_(std::move(transport)) {
    transport_->set_receiver(smp::kEngineChannel, [this](int source, smp::Message message) {
      const bool last = --num_to_receive_ == 0;
      if (transport_->rank() == 1 || !last) {
        transport_->send(source, std::move(message));
      }
      if (last) {
        const std::lock_guard lock(mutex_);
        done_ = true;
        ended_.notify_all();
      }
    });
  }
  ~Rally() { transport_->set_receiver(smp::kEngineChannel, {}); }

  /// To be called on both ranks, with a barrier before play().
  void prepare(int num_rounds) {
    num_rounds_ = num_rounds;
    num_to_receive_ = num_rounds;
    done_ = false;
  }

  double play(int size_bytes) {
    const at::Tensor payload = at::detail::empty_cpu({size_bytes}, at::kByte);
    std::memset(payload.data_ptr(), 1, size_bytes);
    const auto start = Clock::now();
    if (transport_->rank() == 0) {
      transport_->send(1, {smp::kEngineChannel, "a header", payload});
    }
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return done_; });
    return one_way_us(start, num_rounds_);
  }

 private:
  const std::shared_ptr<smp::Transport> transport_;
  int num_rounds_ = 0;
  std::atomic<int> num_to_receive_{0};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
};

void wait(MPI_Request& request) {
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), done == 0) {
    sched_yield();
  }
}

/// Polls like the transport does, into one buffer that it reuses.
double plain_mpi(int rank, int size_bytes, int num_rounds) {
  std::vector<char> buffer(size_bytes, 1);
  const auto start = Clock::now();
  for (int round = 0; round < num_rounds; ++round) {
    for (int turn = 0; turn < 2; ++turn) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (turn == rank) {
        MPI_Isend(buffer.data(), size_bytes, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, &request);
      } else {
        MPI_Irecv(buffer.data(), size_bytes, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, &request);
      }
      wait(request);
    }
  }
  return one_way_us(start, num_rounds);
}

}  // namespace

PYBIND11_MODULE(rally, module) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<Rally>(module, "Rally")
      .def(py::init<std::shared_ptr<smp::Transport>>())
      .def("prepare", &Rally::prepare, without_gil)
      .def("play", &Rally::play, without_gil);
  module.def("plain_mpi", &plain_mpi, without_gil);
}
