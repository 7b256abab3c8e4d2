// What differs between the versions of PyTorch that this builds with, all of it: autograd counts its nodes by
// intrusive_ptr since 2.13, by shared_ptr before.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <utility>

namespace smp::pipeline {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
template <typename Node>
using NodePointer = c10::intrusive_ptr<Node>;

template <typename Node, typename... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}
#else
template <typename Node>
using NodePointer = std::shared_ptr<Node>;

template <typename Node, typename... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
}
#endif

}  // namespace smp::pipeline
