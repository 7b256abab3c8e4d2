// Results of a module that share memory with its arguments or with each other. In plain PyTorch a change in place of
// one of them changes the others, and their autograd history. Between ranks it does not, so whoever uses another one
// then hears it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace smp::pipeline {

/// Can two tensors have an element of one memory in common? Both local or both remote; exact where their strides are
/// equal, else true when they lie in one storage (remote ones: are views of one tensor).
bool share_memory(const at::Tensor& a, const at::Tensor& b);

/// What knows of a change by itself: a remote tensor, its views and its detached twins.
struct MemoryMember {
  /// A tensor of this process that shares memory with it. Autograd's counter tells of changes.
  struct Local {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::VariableVersion version;
    std::uint32_t seen;
  };
  std::string module;  // whose call made it share memory
  std::vector<std::weak_ptr<MemoryMember>> sharers;
  std::vector<Local> locals;
  bool is_stale = false;
};

/// `result` of a call shares memory with `other`: an argument, of which `copy` (or itself) went to the module, or, when
/// both are the same, another result.
struct SharedMemory {
  at::Tensor result;
  at::Tensor other;
  at::Tensor copy;
};

/// From now on the results of a call of module `name` share memory as the pairs say.
void join_memory(const std::vector<SharedMemory>& pairs, const std::string& name);

/// `view` was made by an operator from `base`, both remote: they follow each other.
void join_view(const at::Tensor& view, const at::Tensor& base);

/// Before a use of a remote tensor. Throws UsageError when one that it shares memory with has been changed in place.
void check_memory(const at::Tensor& tensor);

/// Before a change in place of a remote tensor. Throws UsageError when a tensor of this process would have to follow.
void note_write(const at::Tensor& tensor);

}  // namespace smp::pipeline
