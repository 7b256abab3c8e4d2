// What a rank keeps of a call until its backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "smp/error.h"
#include "smp/pipeline/tensor_meta.h"

namespace smp::pipeline {

/// Where the gradients of a call's inputs end up: see CaptureNode.
struct CapturedGradients {
  std::vector<at::Tensor> gradients;
};

/// What is kept of a call (or of a lifted tensor) for its backward: gradient edges, never outputs.
struct CallRecord {
  std::int32_t module = -1;
  bool container = false;
  bool freed = false;  // backward ran without keep_graph
  std::uint32_t step = 0;
  std::int32_t microbatch = 0;
  std::vector<torch::autograd::Edge> outputs;  // an edge without function: that output needs no gradient
  std::shared_ptr<CapturedGradients> captured;
  std::vector<TensorMeta> inputs;
  std::vector<int> parameters;  // that its backward may reach
  std::shared_ptr<void> alive;  // counts the microbatch as live while there is a graph
};

/// A module gave back something else than its issuer expected.
class ResultVaries : public UsageError {
 public:
  ResultVaries(std::int32_t varying, const std::string& message) : UsageError(message), module(varying) {}
  std::int32_t module;
};

}  // namespace smp::pipeline
