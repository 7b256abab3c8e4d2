// The owner's side of operators on remote tensors.
#pragma once

#include <functional>
#include <vector>

#include "smp/pipeline/instruction.h"

namespace smp::pipeline {

/// Runs an aten operator whose arguments were written by its issuer. One list of tensors for each of its returns.
std::vector<std::vector<at::Tensor>> run_operator(const Op& op, const std::function<at::Tensor(ValueId)>& value);

}  // namespace smp::pipeline
