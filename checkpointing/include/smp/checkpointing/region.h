// A region: a piece of forward whose saved tensors are dropped, and made again when backward asks for them.
//
//   forward     every tensor that autograd saves gets a number instead: save()
//   backward    the first number asked for runs the function again, once for each backward: load()
//   recompute   what is saved then, in the same order, is kept until it is asked for: record()
//
// Autograd's graph is that of the forward; the graph of the recompute is thrown away. So gradient hooks see each
// gradient once, and nothing runs autograd inside autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "smp/checkpointing/input_store.h"
#include "smp/checkpointing/replay_state.h"

namespace smp::checkpointing {

/// Standing figures of the regions of one module. Counts only grow.
struct RegionReport {
  std::string name;
  std::atomic<std::int64_t> calls{0};
  std::atomic<std::int64_t> recomputes{0};
  std::atomic<std::int64_t> saved_bytes{0};   // of one call: what would have been kept, other than inputs
  std::atomic<std::int64_t> input_bytes{0};   // of one call: what is kept instead
  std::atomic<std::int64_t> recompute_ns{0};  // of all calls
};

/// One call of a region. Its functions may be called by any thread.
class Region : public std::enable_shared_from_this<Region> {
 public:
  /// Runs the function with these inputs. What autograd saves meanwhile goes to record() with `pass`; once that says
  /// so, the function should be left.
  using Function = std::function<void(Region& region, std::int64_t pass, std::vector<at::Tensor> inputs)>;

  Region(std::shared_ptr<RegionReport> report, ReplayState state, std::unique_ptr<SavedInputs> inputs,
         Function function);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  // ---- forward

  /// A number for a tensor that autograd saves.
  std::uint32_t save(const at::Tensor& x);
  /// No more tensors come. `outside`: storages that are kept anyway (parameters), for the report.
  void end_forward(const std::vector<at::Tensor>& outside);
  /// Also compares the outputs of recomputes; to be called before end_forward().
  void verify(const std::vector<at::Tensor>& outputs);

  // ---- backward

  /// The tensor of a number. Runs the function when this backward has not done so; blocks while another thread does.
  /// Throws UsageError when the function did not save the same tensors again, or an input was changed in place since.
  at::Tensor load(std::uint32_t number);
  /// Nobody can ask for the number any more.
  void drop(std::uint32_t number);

  // ---- recompute

  /// Keeps what autograd saves, which must be without its graph. True: nothing of what comes later is needed. Throws
  /// UsageError when it is not what was saved before.
  bool record(std::int64_t pass, const at::Tensor& x);
  /// The outputs of a recompute that ran to its end, if verify() was called. Throws UsageError when they differ.
  void check_outputs(const std::vector<at::Tensor>& outputs) const;
  [[nodiscard]] bool verifies() const { return !output_hashes_.empty(); }

  [[nodiscard]] const std::string& name() const { return report_->name; }
  /// How many there are in this process: those whose graph is alive.
  [[nodiscard]] static std::int64_t count();

 private:
  struct Meta {
    c10::ScalarType dtype;
    c10::Device device;
    std::uint32_t sizes;  // where they begin in sizes_
    std::uint32_t dims;
  };
  /// What one backward (graph task) has recomputed.
  struct Pass {
    std::uint32_t next = 0;  // number of the next tensor that is saved
    bool running = false;
    std::vector<at::Tensor> tensors;
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> given;
    std::thread::id thread;
  };

  void recompute(std::int64_t pass);
  [[nodiscard]] std::string describe(std::uint32_t number) const;

  const std::shared_ptr<RegionReport> report_;
  const ReplayState state_;
  const std::unique_ptr<SavedInputs> inputs_;
  const Function function_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Meta> metas_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::uint8_t> is_alive_;
  std::size_t needed_ = 0;  // no number from here on is alive
  std::vector<std::size_t> output_hashes_;
  // Until end_forward(), where it measures. Weak: the address of a storage that was freed is then not used again.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::int64_t saved_bytes_ = 0;
  bool measures_ = false;
  std::map<std::int64_t, Pass> passes_;
};

}  // namespace smp::checkpointing
