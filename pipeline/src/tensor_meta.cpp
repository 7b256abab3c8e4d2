#include "smp/pipeline/tensor_meta.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "smp/error.h"
#include "smp/format.h"

namespace smp::pipeline {
namespace {

// Elements between the first and the last one, both counted.
std::int64_t span(const TensorMeta& meta) {
  std::int64_t elements = 1;
  for (std::size_t i = 0; i < meta.sizes.size(); ++i) {
    if (meta.sizes[i] == 0) {
      return 0;
    }
    elements += (meta.sizes[i] - 1) * meta.strides[i];
  }
  return elements;
}

std::int64_t count(const TensorMeta& meta) {
  std::int64_t elements = 1;
  for (auto size : meta.sizes) {
    elements *= size;
  }
  return elements;
}

}  // namespace

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided) {
    throw_usage(
        "a tensor of shape {} has a layout that is not dense (sparse, say): it can't go to or come from a module on "
        "another partition. Pass .to_dense(), or make it in the module that uses it",
        formatted("[{}]", joined(tensor.sizes(), ", ")));
  }
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.requires_grad(),
          tensor.storage_offset()};
}

std::int64_t TensorMeta::bytes() const { return count(*this) * static_cast<std::int64_t>(c10::elementSize(dtype)); }

TensorMeta travelled(const TensorMeta& meta) {
  auto dense = meta;
  dense.storage_offset = 0;
  if (span(meta) <= count(meta)) {
    return dense;
  }
  std::int64_t step = 1;
  for (std::size_t i = dense.sizes.size(); i-- > 0;) {
    dense.strides[i] = step;
    step *= std::max<std::int64_t>(dense.sizes[i], 1);
  }
  return dense;
}

at::Tensor resolved(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
}

at::Tensor pack(const at::Tensor& tensor) {
  const auto plain = resolved(tensor);
  const auto meta = travelled(TensorMeta::of(plain));
  const auto elements = span(meta);
  auto bytes = at::empty({elements * static_cast<std::int64_t>(c10::elementSize(meta.dtype))}, c10::ScalarType::Byte);
  if (elements > 0) {
    // The span itself is copied where it has no gaps (an expanded tensor goes as its one copy), else the elements in
    // order.
    auto typed = bytes.view(meta.dtype);
    if (meta.strides == plain.strides()) {
      typed.copy_(at::as_strided(plain, {elements}, {1}));
    } else {
      typed.as_strided(meta.sizes, meta.strides).copy_(plain);
    }
  }
  return bytes;
}

at::Tensor unpack(const at::Tensor& bytes, const TensorMeta& meta) {
  if (!bytes.defined() || bytes.numel() == 0) {
    return at::empty_strided(meta.sizes, meta.strides, meta.dtype);
  }
  return bytes.view(meta.dtype).as_strided(meta.sizes, meta.strides);
}

}  // namespace smp::pipeline
