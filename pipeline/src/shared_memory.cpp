#include "smp/pipeline/shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "smp/error.h"
#include "smp/pipeline/remote_tensor.h"

namespace smp::pipeline {

namespace {

struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};

/// Is `distance` a sum of multiples of the strides, each by less than the size of its dimension? `dimensions` by
/// descending stride. Each multiple is one of the two next to the quotient, as the smaller strides can't make up for
/// more.
bool is_reachable(std::int64_t distance, const Dimension* dimension, const Dimension* end) {
  if (dimension == end) {
    return distance == 0;
  }
  const auto below = distance / dimension->stride - (distance % dimension->stride < 0 ? 1 : 0);
  for (const auto multiple : {below, below + 1}) {
    if (std::abs(multiple) < dimension->size &&
        is_reachable(distance - multiple * dimension->stride, dimension + 1, end)) {
      return true;
    }
  }
  return false;
}

const void* origin_of(const at::Tensor& x) {
  if (!is_remote(x)) {
    return x.has_storage() ? x.storage().unsafeGetStorageImpl() : nullptr;
  }
  return handle_of(x.is_view() ? at::Tensor(x._base()) : x).get();
}

using Member = std::shared_ptr<MemoryMember>;

[[noreturn]] void refuse(const MemoryMember& member) {
  throw_usage(
      "module '{}' gave back a tensor that shares memory with its argument or with another result. One of them has "
      "been "
      "changed in place and the other one is in use: in plain PyTorch it would change too, but between modules of "
      "different calls it does not. Clone one of them before the change, or let the module return a copy",
      member.module);
}

void check(const MemoryMember& member) {
  const bool local_changed = std::any_of(member.locals.begin(), member.locals.end(), [](const auto& local) {
    return local.version.current_version() != local.seen;
  });
  if (member.is_stale || local_changed) {
    refuse(member);
  }
}

Member& member_of(const at::Tensor& x) { return handle_of(x)->memory(); }

const Member& ensure_member(const at::Tensor& x, const std::string& name) {
  auto& member = member_of(x);
  if (!member) {
    member = std::make_shared<MemoryMember>();
    member->module = name;
  }
  return member;
}

}  // namespace

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (is_remote(a) != is_remote(b) || origin_of(a) == nullptr || origin_of(a) != origin_of(b) || a.numel() == 0 ||
      b.numel() == 0) {
    return false;
  }
  if (a.strides() != b.strides() || a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return true;
  }
  std::vector<Dimension> dimensions;
  for (std::int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) > 0) {
      dimensions.push_back({a.size(i), a.stride(i)});
    }
  }
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& x, const Dimension& y) { return x.stride > y.stride; });
  return is_reachable(a.storage_offset() - b.storage_offset(), dimensions.data(),
                      dimensions.data() + dimensions.size());
}

void join_memory(const std::vector<SharedMemory>& pairs, const std::string& name) {
  std::vector<std::vector<Member>>
      sharers;  // all of before this call, so that results that lie side by side stay apart
  for (const auto& pair : pairs) {
    auto& with = sharers.emplace_back();
    for (const auto& x : {pair.copy, pair.other}) {
      if (!is_remote(x)) {
        continue;
      }
      with.push_back(ensure_member(x, name));
      for (const auto& old : with.back()->sharers) {
        if (auto member = old.lock()) {
          with.push_back(std::move(member));
        }
      }
    }
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto& result = ensure_member(pairs[i].result, name);
    for (const auto& member : sharers[i]) {
      if (member != result) {
        member->sharers.push_back(result);
        result->sharers.push_back(member);
      }
    }
    if (const auto& other = pairs[i].other; !is_remote(other) && !other.is_inference()) {
      const auto& version = other.unsafeGetTensorImpl()->version_counter();
      result->locals.push_back(
          {c10::weak_intrusive_ptr<c10::TensorImpl>(other.getIntrusivePtr()), version, version.current_version()});
    }
  }
}

void join_view(const at::Tensor& view, const at::Tensor& base) { member_of(view) = member_of(base); }

void check_memory(const at::Tensor& tensor) {
  if (const auto& member = member_of(tensor)) {
    check(*member);
  }
}

void note_write(const at::Tensor& tensor) {
  const auto& member = member_of(tensor);
  if (!member) {
    return;
  }
  check(*member);
  for (const auto& local : member->locals) {
    if (local.tensor.use_count() > 0) {
      refuse(*member);
    }
  }
  for (const auto& sharer : member->sharers) {
    if (const auto other = sharer.lock()) {
      other->is_stale = true;
    }
  }
}

}  // namespace smp::pipeline
