#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <cstddef>
#include <cstdint>

namespace smp {

/// An uninitialised 1-D uint8 CPU tensor. It goes around the dispatcher, and is an ordinary tensor whatever modes
/// (inference, tracing, a user's subclass) are on in the calling thread: it may be used by other threads.
inline at::Tensor new_bytes(std::size_t size_bytes) {
  const c10::InferenceMode ordinary(false);
  return at::detail::empty_cpu({static_cast<std::int64_t>(size_bytes)}, at::kByte);
}

}  // namespace smp
