// Arguments of aten operators as bytes.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>

#include "smp/pipeline/wire.h"

namespace smp::pipeline {

/// Appends one argument. Tensors (undefined ones too) go through `tensor`, which must write something that starts with
/// a byte other than the tags here. Throws UsageError for a kind of argument that can't travel, such as a generator.
using TensorWriter = std::function<void(const at::Tensor&, Writer&)>;
void write_argument(const c10::IValue& argument, Writer& writer, const TensorWriter& tensor);

using TensorReader = std::function<at::Tensor(Reader&)>;
c10::IValue read_argument(Reader& reader, const TensorReader& tensor);

/// Calls `visit` for each tensor of an argument, lists included, and puts what it returns in its place.
void replace_tensors(c10::IValue& argument, const std::function<at::Tensor(const at::Tensor&)>& visit);

/// A small local tensor with its data, and whether it is a Python number in disguise (which promotes types
/// differently).
void write_inline(const at::Tensor& tensor, Writer& writer);
at::Tensor read_inline(Reader& reader);

}  // namespace smp::pipeline
