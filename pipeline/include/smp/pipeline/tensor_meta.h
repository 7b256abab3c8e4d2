// What is known of a tensor without its data, and how its data travels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "smp/pipeline/wire.h"

namespace smp::pipeline {

/// Shape, strides and storage offset (in elements), dtype and requires_grad of a tensor. Autograd tells by the offset
/// which part of its base a view is.
struct TensorMeta {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool requires_grad = false;
  std::int64_t storage_offset = 0;

  static TensorMeta of(const at::Tensor& tensor);
  [[nodiscard]] std::int64_t bytes() const;

  template <typename Archive>
  void fields(Archive& archive) {
    archive(sizes, strides, dtype, requires_grad, storage_offset);
  }
};

/// How `meta` lies in memory after it travelled: the strides stay when the elements span no gaps (dense or expanded
/// tensors), so that kernels on the other rank sum in the same order; otherwise the copy is contiguous.
TensorMeta travelled(const TensorMeta& meta);

/// `tensor`, or what it means where it is a view that is conjugated or negated only when it is read: other ranks take a
/// tensor for what its bytes say. Differentiable.
at::Tensor resolved(const at::Tensor& tensor);

/// A copy of the bytes of `tensor` laid out as `travelled` says: a 1-D uint8 tensor that shares nothing with it.
at::Tensor pack(const at::Tensor& tensor);

/// The tensor that `pack` made `bytes` of; it takes over the memory of `bytes`.
at::Tensor unpack(const at::Tensor& bytes, const TensorMeta& meta);

}  // namespace smp::pipeline
