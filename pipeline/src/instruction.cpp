#include "smp/pipeline/instruction.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

namespace smp::pipeline {
namespace {

template <std::size_t Index = 0>
Body decode_body(std::size_t index, Reader& reader) {
  if constexpr (Index == std::variant_size_v<Body>) {
    throw_failure("a message names instruction {}, which this version of smp does not know", index);
  } else {
    if (index != Index) {
      return decode_body<Index + 1>(index, reader);
    }
    std::variant_alternative_t<Index, Body> body;
    body.fields(reader);
    return body;
  }
}

void append(std::vector<ValueId>& to, const std::vector<ValueId>& ids) {
  for (auto id : ids) {
    if (id != 0) {
      to.push_back(id);
    }
  }
}

}  // namespace

Modes Modes::current() {
  return {c10::GradMode::is_enabled(), at::autocast::is_autocast_enabled(at::kCPU),
          at::autocast::is_autocast_cache_enabled(), at::autocast::get_autocast_dtype(at::kCPU)};
}

void Instruction::encode(Writer& writer) const {
  writer(frame, issuer, microbatch, step, outermost, ancestors, key, static_cast<std::uint8_t>(body.index()));
  // fields() serves reading as well, so it is not const; a Writer changes nothing.
  std::visit([&](const auto& it) { const_cast<std::remove_cvref_t<decltype(it)>&>(it).fields(writer); }, body);
}

Instruction Instruction::decode(Reader& reader) {
  Instruction instruction;
  reader(instruction.frame, instruction.issuer, instruction.microbatch, instruction.step, instruction.outermost,
         instruction.ancestors, instruction.key);
  instruction.body = decode_body(reader.get<std::uint8_t>(), reader);
  return instruction;
}

std::vector<ValueId> Instruction::needs() const {
  std::vector<ValueId> ids;
  if (const auto* call = std::get_if<Call>(&body)) {
    append(ids, call->inputs);
  } else if (const auto* op = std::get_if<Op>(&body)) {
    append(ids, op->values);
  } else if (const auto* backward = std::get_if<Backward>(&body)) {
    ids.push_back(backward->call);
    append(ids, backward->gradients);
  } else if (const auto* accumulate = std::get_if<Accumulate>(&body)) {
    ids = {accumulate->record, accumulate->gradient};
  } else if (const auto* send = std::get_if<Send>(&body)) {
    ids = {send->value};
  } else if (const auto* alias = std::get_if<Alias>(&body)) {
    ids = {alias->value};
  }
  return ids;
}

const std::vector<ValueId>* Instruction::mutated() const {
  if (const auto* op = std::get_if<Op>(&body)) {
    return &op->mutated;
  }
  if (const auto* call = std::get_if<Call>(&body)) {
    return &call->mutated;
  }
  return nullptr;
}

std::vector<std::pair<ValueId, std::uint64_t>> Instruction::makes() const {
  std::vector<std::pair<ValueId, std::uint64_t>> runs;
  const auto each = [&](const std::vector<ValueId>& ids) {
    for (auto id : ids) {
      if (id != 0) {
        runs.emplace_back(id, 1);
      }
    }
  };
  if (const auto* call = std::get_if<Call>(&body)) {
    runs = {{call->call, 1}, {call->results, kUnknownResults}};
  } else if (const auto* op = std::get_if<Op>(&body); op != nullptr && op->reply != 0) {
    runs = {{op->results.front(), kUnknownResults}};
  } else if (op != nullptr) {
    each(op->results);
  } else if (const auto* backward = std::get_if<Backward>(&body)) {
    each(backward->results);
  } else if (const auto* lift = std::get_if<Lift>(&body)) {
    each({lift->record, lift->value});
  } else if (const auto* send = std::get_if<Send>(&body)) {
    each({send->copy});
  } else if (const auto* alias = std::get_if<Alias>(&body)) {
    each({alias->name});
  }
  return runs;
}

const char* Instruction::name() const {
  static constexpr const char* kNames[] = {"CALL", "OP",    "BACKWARD", "LIFT", "ACCUMULATE",
                                           "SEND", "ALIAS", "END",      "CLOSE"};
  static_assert(std::size(kNames) == std::variant_size_v<Body>);
  return kNames[body.index()];
}

}  // namespace smp::pipeline
