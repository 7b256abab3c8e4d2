// Operators on remote tensors: two boxed fallbacks of the dispatcher, one above autograd and one below it.
//
//   h + x            (h on partition 1, x here)
//    │ DeferredInit: gather_operands   x moves to partition 1, differentiably
//    │ Autograd                        records AddBackward on remote tensors
//    ▼ Fake: issue_operator            OP to partition 1; what comes out is known from meta kernels
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

#include "smp/error.h"
#include "smp/pipeline/arguments.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/operators.h"
#include "smp/random.h"

namespace smp::pipeline {
namespace {

// Local operands of at most this many elements travel inside the instruction.
constexpr std::int64_t kInlineElements = 16;
constexpr std::size_t kKnownOperators = 1 << 16;

enum class TensorTag : std::uint8_t { kUndefined, kValue, kInline };

/// What an operator gives back for arguments like these.
struct OperatorReport {
  struct Result {
    int argument = -1;  // the result is this argument, changed in place
    bool list = false;
    std::vector<std::optional<TensorMeta>> tensors;  // without value: undefined
  };
  std::vector<Result> results;
  std::vector<std::pair<std::size_t, TensorMeta>> mutated;  // arguments, as they are afterwards
};

std::mutex reports_mutex;
std::unordered_map<std::string, OperatorReport> reports;  // the same for every engine of a process

std::vector<at::Tensor> tensors_in(const c10::IValue& argument) {
  std::vector<at::Tensor> tensors;
  auto copy = argument;
  replace_tensors(copy, [&](const at::Tensor& x) {
    tensors.push_back(x);
    return x;
  });
  return tensors;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Operators without a kernel of their own that look at the data of these arguments, to decide what they consist of.
bool looks_into(const c10::FunctionSchema& schema, std::size_t argument) {
  if (schema.name() == "aten::tensor_split" && schema.overload_name() == "tensor_indices_or_sections") {
    return argument == 1;
  }
  if (schema.name() == "aten::_pack_padded_sequence" || schema.name() == "aten::_pad_packed_sequence") {
    return argument == 1;  // lengths and batch sizes, which lie on the CPU
  }
  if (schema.name() == "aten::_pack_padded_sequence_backward") {
    return argument == 2;
  }
  if (schema.overload_name() == "data" && (schema.name() == "aten::lstm" || schema.name() == "aten::gru" ||
                                           schema.name() == "aten::rnn_tanh" || schema.name() == "aten::rnn_relu")) {
    return argument == 1;  // batch sizes
  }
  return schema.name() == "aten::ctc_loss" && schema.overload_name() == "Tensor" && argument >= 2;
}

/// Gives a tensor without strides, which nothing here can describe.
bool makes_nested(std::string_view name) { return name.find("nested_tensor") != std::string_view::npos; }

/// Takes strides that its issuer made from those of its first argument.
bool relies_on_layout(std::string_view name) { return name.starts_with("aten::as_strided"); }

/// Answers with a number, but from the metadata of tensors alone.
bool asks_for_metadata(const c10::FunctionSchema& schema) { return schema.name() == "aten::_fused_sdp_choice"; }

bool gives_tensors(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    const auto kind = result.type()->kind();
    return kind == c10::TypeKind::TensorType ||
           (kind == c10::TypeKind::ListType && result.type()->containedType(0)->kind() == c10::TypeKind::TensorType);
  });
}

bool stays_inline(const at::Tensor& x) { return !is_remote(x) && x.dim() == 0 && !x.requires_grad(); }

// ---- above autograd

void gather_operands(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Of the result: a parameter that lives elsewhere has the key of this function only, what stands for it has both.
  bool remote = keys.has(c10::DispatchKey::Fake);
  if (auto* frame = current_frame(); frame != nullptr) {
    auto& engine = *frame->engine;
    const auto& schema = op.schema();
    const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
    const auto travels_inside = [&](const at::Tensor& x) {
      return stays_inline(x) && engine.home_of(x) == engine.partition();
    };
    bool local = false;
    std::vector<at::Tensor> operands;
    std::optional<int> home;
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      if (looks_into(schema, i)) {
        replace_tensors(arguments[static_cast<std::ptrdiff_t>(i)],
                        [&](const at::Tensor& x) { return engine.fetch(x); });
      }
    }
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      for (const auto& x : tensors_in(arguments[static_cast<std::ptrdiff_t>(i)])) {
        if (writes(schema.arguments()[i])) {
          // What is changed in place stays where it is.
          if (is_remote(x)) {
            home = engine.home_of(x);
          } else {
            local = true;
          }
        }
        if (!travels_inside(x) && !looks_into(schema, i)) {
          operands.push_back(x);
        }
      }
    }
    if (!local && !home) {
      home = engine.common_home(operands);
    }
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      if (looks_into(schema, i) || (local && writes(schema.arguments()[i]))) {
        continue;
      }
      replace_tensors(arguments[static_cast<std::ptrdiff_t>(i)], [&](const at::Tensor& x) {
        return local ? engine.to_local(x) : travels_inside(x) ? x : engine.to_home(x, *home);
      });
    }
    remote = !local;
  }
  // Not by a guard of this thread: the operators that this one is composed of come through here too, since they may
  // change tensors in place that were made on the way.
  keys = remote ? keys.add(c10::DispatchKey::Fake) : keys.remove(c10::DispatchKey::Fake);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::DeferredInit),
                     stack);
}

// ---- below autograd

/// Like at::empty_strided, with the storage offset too.
at::Tensor empty_laid_out(const TensorMeta& meta, const at::TensorOptions& options) {
  if (meta.storage_offset == 0) {
    return at::empty_strided(meta.sizes, meta.strides, options);
  }
  auto elements = meta.storage_offset + 1;
  for (std::size_t i = 0; i < meta.sizes.size(); ++i) {
    elements += std::max<std::int64_t>(meta.sizes[i] - 1, 0) * meta.strides[i];
  }
  return at::empty_strided({elements}, {1}, options).as_strided(meta.sizes, meta.strides, meta.storage_offset);
}

at::Tensor meta_of(const at::Tensor& x) {
  return stays_inline(x)
             ? x
             : empty_laid_out(TensorMeta::of(x), at::TensorOptions().dtype(x.scalar_type()).device(c10::kMeta));
}

/// Runs the meta kernel. Without value: what comes out depends on data, there is no such kernel, or it fails; then its
/// owner runs the operator and says what came out, or how it failed.
std::optional<OperatorReport> infer(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  if (op.hasTag(at::Tag::dynamic_output_shape)) {
    return std::nullopt;
  }
  const auto& schema = op.schema();
  torch::jit::Stack stack;
  for (auto argument : arguments) {
    replace_tensors(argument, meta_of);
    if (argument.isDevice()) {
      argument = c10::Device(c10::kMeta);
    }
    stack.push_back(std::move(argument));
  }
  const auto before = stack;
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  OperatorReport report;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    if (writes(schema.arguments()[i]) && before[i].isTensor()) {
      report.mutated.emplace_back(i, TensorMeta::of(before[i].toTensor()));
    }
  }
  for (std::size_t k = 0; k < stack.size(); ++k) {
    OperatorReport::Result result;
    const auto* alias = schema.returns()[k].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* of = schema.arguments()[i].alias_info();
        if (of != nullptr && of->isWrite() && of->beforeSets() == alias->beforeSets()) {
          result.argument = static_cast<int>(i);
        }
      }
    }
    if (result.argument < 0) {
      result.list = stack[k].isTensorList();
      for (const auto& x : result.list ? stack[k].toTensorVector() : std::vector<at::Tensor>{stack[k].toTensor()}) {
        result.tensors.push_back(x.defined() ? std::optional(TensorMeta::of(x)) : std::nullopt);
      }
    }
    report.results.push_back(std::move(result));
  }
  return report;
}

/// A tensor of this process with the metadata of a remote one; its data means nothing.
at::Tensor like(const at::Tensor& x) {
  auto out = at::empty_strided(x.sizes(), x.strides(), at::TensorOptions().dtype(x.scalar_type()).device(at::kCPU));
  return x.requires_grad() ? out.set_requires_grad(true) : out;
}

/// Same handle, no operator: detach and alias name the same value.
bool only_renames(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::detach" || schema.name() == "aten::alias";
}

void issue_operator(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, schema.arguments().size());

  if (only_renames(schema) && is_remote(arguments[0].toTensor())) {
    const auto& x = arguments[0].toTensor();
    stack->emplace_back(make_remote(handle_of(x), TensorMeta::of(x)));
    return;
  }
  auto* frame = current_frame();
  if (frame == nullptr) {
    throw_usage(
        "{} was called outside a step on a tensor that lives on another partition: return the tensor from the "
        "@smp.step function, or read it inside",
        schema.name());
  }
  if (makes_nested(schema.name())) {
    throw_usage(
        "{} makes a nested tensor of a tensor that lives on another partition, which is not possible. Of "
        "nn.TransformerEncoder: pass enable_nested_tensor=False to it, or place it on one partition as a whole",
        schema.name());
  }
  auto& engine = *frame->engine;
  bool changes_local = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (writes(schema.arguments()[i])) {
      for (const auto& x : tensors_in(arguments[i])) {
        changes_local |= !is_remote(x);
      }
    }
  }
  if (changes_local || !gives_tensors(schema)) {  // .item(), equal, is_nonzero: somebody wants the data
    for (auto& argument : arguments) {
      replace_tensors(argument, [&](const at::Tensor& x) {
        return asks_for_metadata(schema) && is_remote(x) ? like(x) : engine.fetch(x);
      });
    }
    for (auto& argument : arguments) {
      stack->push_back(std::move(argument));
    }
    op.callBoxed(stack);
    return;
  }

  int home = engine.partition();
  for (const auto& argument : arguments) {
    for (const auto& x : tensors_in(argument)) {
      if (is_remote(x)) {
        home = handle_of(x)->home();
      }
    }
  }
  for (auto& argument : arguments) {  // constants that a decomposition made, gradients that come from outside
    replace_tensors(argument, [&](const at::Tensor& x) {
      return is_remote(x) || x.numel() <= kInlineElements ? x : engine.to_home(x.detach(), home, false);
    });
  }

  Op instruction;
  instruction.name = schema.name();
  instruction.overload = schema.overload_name();
  Writer wire;
  Writer key;
  key(instruction.name, instruction.overload);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    write_argument(arguments[i], wire, [&](const at::Tensor& x, Writer& writer) {
      if (!x.defined()) {
        writer(TensorTag::kUndefined);
      } else if (is_remote(x)) {
        if (writes(schema.arguments()[i])) {
          note_write(x);
        }
        const auto id = handle_of(x)->id();
        writer(TensorTag::kValue, id);
        instruction.values.push_back(id);
        if (writes(schema.arguments()[i])) {
          instruction.mutated.push_back(id);
        }
      } else {
        writer(TensorTag::kInline);
        write_inline(x, writer);
      }
    });
    write_argument(arguments[i], key, [&](const at::Tensor& x, Writer& writer) {
      writer(x.defined(), x.defined() && x.unsafeGetTensorImpl()->is_wrapped_number());
      if (x.defined()) {
        auto meta = TensorMeta::of(x);
        meta.requires_grad = false;
        meta.fields(writer);
      }
    });
  }
  if (relies_on_layout(instruction.name)) {
    TensorMeta::of(arguments[0].toTensor()).fields(wire);
  }
  instruction.arguments = wire.take();
  const auto draws = op.hasTag(at::Tag::nondeterministic_seeded) ? draw_key() : 0;

  std::optional<OperatorReport> report;
  {
    const std::lock_guard lock(reports_mutex);
    if (const auto known = reports.find(key.bytes()); known != reports.end()) {
      report = known->second;
    }
  }
  if (!report) {
    report = infer(op, arguments);
    if (report) {
      const std::lock_guard lock(reports_mutex);
      if (reports.size() >= kKnownOperators) {
        reports.clear();
      }
      reports.emplace(key.bytes(), *report);
    }
  }

  if (!report) {  // only its owner can tell what comes out
    instruction.reply = engine.new_ids();
    const auto first = engine.new_ids(kUnknownResults);
    instruction.results = {first};
    const auto reply = instruction.reply;
    engine.issue(home, std::move(instruction), draws);
    const auto bytes = engine.wait_reply(reply);
    Reader reader(bytes);
    if (!reader.get<bool>()) {
      TORCH_CHECK(false, reader.get<std::string>());
    }
    std::size_t next = 0;
    for (const auto& returned : schema.returns()) {
      const auto count = reader.get<std::uint64_t>();
      c10::List<at::Tensor> tensors;
      for (std::uint64_t k = 0; k < count; ++k) {
        TensorMeta meta;
        meta.fields(reader);
        tensors.push_back(engine.new_remote(home, nth(first, next++), meta));
      }
      if (returned.type()->kind() == c10::TypeKind::ListType) {
        stack->emplace_back(std::move(tensors));
      } else {
        stack->emplace_back(tensors.get(0));
      }
    }
    return;
  }

  for (std::size_t k = 0; k < report->results.size(); ++k) {
    const auto& result = report->results[k];
    if (result.argument >= 0) {
      instruction.results.push_back(0);
      stack->push_back(arguments[static_cast<std::size_t>(result.argument)]);
      continue;
    }
    const bool is_view = schema.returns()[k].alias_info() != nullptr && arguments[0].isTensor();
    c10::List<at::Tensor> tensors;
    for (const auto& meta : result.tensors) {
      instruction.results.push_back(meta ? engine.new_ids() : 0);
      tensors.push_back(meta ? engine.new_remote(home, instruction.results.back(), *meta) : at::Tensor());
      if (is_view && meta && is_remote(arguments[0].toTensor())) {
        join_view(tensors.get(tensors.size() - 1), arguments[0].toTensor());
      }
    }
    if (result.list) {
      stack->emplace_back(std::move(tensors));
    } else {
      stack->emplace_back(tensors.get(0));
    }
  }
  for (const auto& [i, meta] : report->mutated) {
    arguments[i].toTensor().unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes, meta.strides, meta.storage_offset);
  }
  engine.issue(home, std::move(instruction), draws);
}

}  // namespace

std::vector<std::vector<at::Tensor>> run_operator(const Op& op, const std::function<at::Tensor(ValueId)>& value) {
  // A gradient may lie in memory otherwise than its issuer supposes, who takes it to lie like the input. Then a view
  // may need a copy, which reshape makes, and strides that were made from the supposed ones need those.
  const bool reshapes = (op.name == "aten::view" && op.overload.empty()) || op.name == "aten::_reshape_alias";
  const auto issued = c10::Dispatcher::singleton().findSchemaOrThrow(op.name.c_str(), op.overload.c_str());
  const auto handle = reshapes ? c10::Dispatcher::singleton().findSchemaOrThrow("aten::reshape", "") : issued;
  Reader reader(op.arguments);
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < issued.schema().arguments().size(); ++i) {
    stack.push_back(read_argument(reader, [&](Reader& bytes) {
      switch (bytes.get<TensorTag>()) {
        case TensorTag::kValue:
          return value(bytes.get<ValueId>());
        case TensorTag::kInline:
          return read_inline(bytes);
        case TensorTag::kUndefined:
          break;
      }
      return at::Tensor();
    }));
  }
  if (relies_on_layout(op.name)) {
    TensorMeta supposed;
    supposed.fields(reader);
    const auto& x = stack[0].toTensor();
    if (x.strides() != supposed.strides || x.storage_offset() != supposed.storage_offset) {
      stack[0] = empty_laid_out(supposed, x.options()).copy_(x);
    }
  }
  torch::jit::drop(stack, stack.size() - handle.schema().arguments().size());  // reshape takes no strides
  handle.callBoxed(&stack);
  std::vector<std::vector<at::Tensor>> results;
  for (const auto& result : stack) {
    results.push_back(result.isTensorList() ? result.toTensorVector() : std::vector<at::Tensor>{result.toTensor()});
    for (auto& x : results.back()) {
      x = x.defined() ? resolved(x) : x;
    }
  }
  return results;
}

}  // namespace smp::pipeline

// Registered for every operator; only remote tensors carry these keys.
TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&smp::pipeline::gather_operands>());
}
TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&smp::pipeline::issue_operator>());
}
