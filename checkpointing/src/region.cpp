#include "smp/checkpointing/region.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <functional>
#include <string_view>
#include <utility>

#include "smp/error.h"

namespace smp::checkpointing {
namespace {

// A tensor that is asked for outside of any backward.
constexpr std::int64_t kNoBackward = -1;

std::atomic<std::int64_t> num_regions{0};

std::string describe_meta(c10::ScalarType dtype, c10::Device device, c10::IntArrayRef sizes) {
  return formatted("{} {} on {}", c10::toString(dtype), c10::str(sizes), device.str());
}

/// Of all bytes of each tensor, in order.
std::vector<std::size_t> hashes_of(const std::vector<at::Tensor>& outputs) {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::size_t> hashes{outputs.size()};
  for (const auto& x : outputs) {
    const auto strided = x.layout() == c10::kStrided ? x.detach() : x.detach().to_dense();
    const auto here = at::empty(strided.sizes(), strided.options().device(at::kCPU)).copy_(strided);
    const std::string_view bytes(static_cast<const char*>(here.const_data_ptr()), here.nbytes());
    hashes.push_back(std::hash<std::string_view>{}(bytes));
  }
  return hashes;
}

}  // namespace

Region::Region(std::shared_ptr<RegionReport> report, ReplayState state, std::unique_ptr<SavedInputs> inputs,
               Function function)
    : report_(std::move(report)),
      state_(std::move(state)),
      inputs_(std::move(inputs)),
      function_(std::move(function)),
      measures_(report_->calls++ == 0) {
  ++num_regions;
}

Region::~Region() { --num_regions; }

std::int64_t Region::count() { return num_regions; }

// ---- forward

std::uint32_t Region::save(const at::Tensor& x) {
  const std::lock_guard lock(mutex_);
  const auto sizes = x.sizes();
  metas_.push_back({x.scalar_type(), x.device(), static_cast<std::uint32_t>(sizes_.size()),
                    static_cast<std::uint32_t>(sizes.size())});
  sizes_.insert(sizes_.end(), sizes.begin(), sizes.end());
  is_alive_.push_back(1);
  needed_ = is_alive_.size();
  if (measures_ && x.has_storage()) {
    const auto& storage = x.storage();
    if (storages_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl()).second) {
      saved_bytes_ += static_cast<std::int64_t>(storage.nbytes());
    }
  }
  return static_cast<std::uint32_t>(metas_.size() - 1);
}

void Region::end_forward(const std::vector<at::Tensor>& outside) {
  const std::lock_guard lock(mutex_);
  if (!measures_) {
    return;
  }
  measures_ = false;
  for (const auto& x : outside) {
    if (x.has_storage() && storages_.erase(x.storage().unsafeGetStorageImpl()) > 0) {
      saved_bytes_ -= static_cast<std::int64_t>(x.storage().nbytes());
    }
  }
  storages_.clear();
  report_->saved_bytes = saved_bytes_;
  report_->input_bytes = inputs_->bytes();
}

void Region::verify(const std::vector<at::Tensor>& outputs) { output_hashes_ = hashes_of(outputs); }

void Region::check_outputs(const std::vector<at::Tensor>& outputs) const {
  if (hashes_of(outputs) != output_hashes_) {
    throw_usage(
        "{} gave back other values when it ran again for backward, so gradients would be wrong. Its forward must "
        "compute the same both times: register generators that it draws from "
        "(smp.checkpointing.register_generator, or register_rng_tracker for a tracker of several), keep "
        "preserve_rng_state=True, and don't let it depend on what changes between forward and backward",
        name());
  }
}

// ---- backward

at::Tensor Region::load(std::uint32_t number) {
  const std::int64_t task = torch::autograd::get_current_graph_task_id();
  // Goes after the lock: the end of a tensor may need the interpreter's lock, which another thread may hold that waits
  // for this one.
  std::vector<Pass> ended;
  std::unique_lock lock(mutex_);
  if (!passes_.contains(task)) {
    // A backward that failed tells nobody that it has ended. One that goes on computes again.
    for (auto pass = passes_.begin(); pass != passes_.end();) {
      if (!pass->second.running) {
        ended.push_back(std::move(pass->second));
        pass = passes_.erase(pass);
      } else {
        ++pass;
      }
    }
  }
  auto [entry, is_new] = passes_.try_emplace(task);
  auto& pass = entry->second;  // stays where it is when others come and go
  if (is_new && task != kNoBackward) {
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
      if (const auto region = weak.lock()) {
        std::optional<Pass> ended;
        const std::lock_guard relock(region->mutex_);
        if (auto node = region->passes_.extract(task)) {
          ended = std::move(node.mapped());
        }
      }
    });
  }
  while (pass.running) {
    if (pass.thread == std::this_thread::get_id()) {
      throw_usage("{} needs its own saved tensors in order to run again: it can't be checkpointed", name());
    }
    changed_.wait(lock);
  }
  at::Tensor x;
  const auto take = [&] {
    if (number < pass.tensors.size()) {
      if (pass.tensors[number].defined()) {
        x = std::exchange(pass.tensors[number], at::Tensor());
        pass.given[number] = c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr());
      } else if (auto alive = pass.given[number].lock()) {
        x = at::Tensor(std::move(alive));
      }
    }
    return x.defined();
  };
  if (!take()) {
    ended.push_back(std::exchange(pass, Pass()));
    pass.running = true;
    pass.thread = std::this_thread::get_id();
    pass.tensors.assign(metas_.size(), at::Tensor());
    pass.given.assign(metas_.size(), c10::weak_intrusive_ptr<c10::TensorImpl>(c10::intrusive_ptr<c10::TensorImpl>()));
    lock.unlock();
    try {
      recompute(task);
    } catch (...) {
      lock.lock();
      ended.push_back(std::exchange(pass, Pass()));
      changed_.notify_all();
      throw;
    }
    lock.lock();
    pass.running = false;
    changed_.notify_all();
    if (!take()) {
      ended.push_back(std::exchange(pass, Pass()));
      throw_usage(
          "{} saved {} tensors for backward, but only {} when it ran again: its forward must do the same both times "
          "(no branch on what changes between forward and backward)",
          name(), metas_.size(), ended.back().next);
    }
  }
  if (task == kNoBackward) {
    passes_.erase(entry);
  }
  return x;
}

void Region::drop(std::uint32_t number) {
  std::vector<at::Tensor> dropped;  // goes after the lock
  const std::lock_guard lock(mutex_);
  is_alive_[number] = 0;
  while (needed_ > 0 && is_alive_[needed_ - 1] == 0) {
    --needed_;
  }
  for (auto& [id, pass] : passes_) {
    if (number < pass.tensors.size()) {
      dropped.push_back(std::exchange(pass.tensors[number], at::Tensor()));
    }
  }
}

void Region::recompute(std::int64_t pass) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<at::Tensor> inputs;
  try {
    inputs = inputs_->load();
  } catch (const c10::Error& error) {
    throw_usage("{} can't run again for backward, since an input was changed in place after it was called: {}", name(),
                error.what_without_backtrace());
  }
  {
    const ReplayState::Scope scope(state_);
    function_(*this, pass, std::move(inputs));
  }
  ++report_->recomputes;
  report_->recompute_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

// ---- recompute

bool Region::record(std::int64_t pass_id, const at::Tensor& x) {
  const std::lock_guard lock(mutex_);
  auto& pass = passes_.at(pass_id);
  const auto number = pass.next++;
  if (number >= pass.tensors.size()) {
    return true;  // only where verify mode goes on to the end
  }
  const auto& meta = metas_[number];
  const c10::IntArrayRef sizes(sizes_.data() + meta.sizes, meta.dims);
  if (meta.dtype != x.scalar_type() || meta.device != x.device() || sizes != x.sizes()) {
    throw_usage(
        "{} saved other tensors for backward when it ran again: tensor {} was {} and now is {}. Its forward must do "
        "the same both times",
        name(), number, describe_meta(meta.dtype, meta.device, sizes),
        describe_meta(x.scalar_type(), x.device(), x.sizes()));
  }
  if (is_alive_[number] != 0) {
    pass.tensors[number] = x;
  }
  return number + 1 >= needed_;
}

}  // namespace smp::checkpointing
