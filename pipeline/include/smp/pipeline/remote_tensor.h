// Remote tensors: shape, strides, dtype and autograd are here, the data is a value in the table of its home.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "smp/pipeline/shared_memory.h"
#include "smp/pipeline/tensor_meta.h"

namespace smp::pipeline {

/// Names a value or a call for the whole launch: (counter << 8) | issuing rank. 0 names nothing.
using ValueId = std::uint64_t;
inline constexpr int kRankBits = 8;
/// Results of a call or operator whose outcome is not known yet: so many names are set aside for it.
inline constexpr std::uint64_t kUnknownResults = 1 << 16;
/// Name `index` of a run of names that were set aside together.
inline ValueId nth(ValueId first, std::size_t index) { return first + (static_cast<ValueId>(index) << kRankBits); }

/// What handles leave behind when they die. Finalizers only push here: they may run anywhere, under any lock.
class ReleaseQueue {
 public:
  struct Release {
    int home;
    ValueId id;
    bool borrowed;
  };
  void push(Release release) noexcept;
  std::vector<Release> take();
  [[nodiscard]] bool empty() const { return size_.load(std::memory_order_relaxed) == 0; }

 private:
  std::mutex mutex_;
  std::vector<Release> releases_;
  std::atomic<std::size_t> size_{0};
};

/// Keeps one value (or call) of a rank alive. The last copy's end releases it. A borrowed handle belongs to a frame
/// that was lent the value: it only gives back a pin.
class ValueHandle : public c10::intrusive_ptr_target {
 public:
  ValueHandle(std::shared_ptr<ReleaseQueue> queue, int home, ValueId id, bool borrowed)
      : home_(home), id_(id), borrowed_(borrowed), queue_(std::move(queue)) {}
  ~ValueHandle() override { queue_->push({home_, id_, borrowed_}); }
  ValueHandle(const ValueHandle&) = delete;
  ValueHandle& operator=(const ValueHandle&) = delete;

  [[nodiscard]] int home() const { return home_; }
  [[nodiscard]] ValueId id() const { return id_; }
  [[nodiscard]] const std::shared_ptr<ReleaseQueue>& queue() const { return queue_; }
  /// Empty, unless the value shares memory with others that do not follow its changes.
  [[nodiscard]] std::shared_ptr<MemoryMember>& memory() { return memory_; }

 private:
  int home_;
  ValueId id_;
  bool borrowed_;
  std::shared_ptr<ReleaseQueue> queue_;
  std::shared_ptr<MemoryMember> memory_;
};
using Handle = c10::intrusive_ptr<ValueHandle>;

/// The tensor without data. Two dispatch keys that nothing else uses bring its operators to us: DeferredInit, above
/// autograd, gives the operands one home; Fake, below autograd, issues the operator there (operators.cpp). To autograd
/// it is a CPU tensor, so that its nodes run on the thread that called backward.
class RemoteImpl final : public c10::TensorImpl {
 public:
  RemoteImpl(Handle handle, const TensorMeta& meta);
  [[nodiscard]] const Handle& handle() const { return handle_; }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& source) override;

 private:
  const char* tensorimpl_type_name() const override { return "a tensor that lives on another partition"; }

  Handle handle_;
};

bool is_remote(const at::Tensor& tensor);

/// The handle of a remote tensor. Precondition: is_remote(tensor).
const Handle& handle_of(const at::Tensor& tensor);

at::Tensor make_remote(Handle handle, const TensorMeta& meta);

}  // namespace smp::pipeline
