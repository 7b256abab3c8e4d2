// The instructions that frames issue, and the lanes' unit of work. See docs/architecture.md for the table.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "smp/pipeline/remote_tensor.h"
#include "smp/pipeline/wire.h"

namespace smp::pipeline {

using FrameId = std::uint64_t;

/// The thread-local settings under which the issuer called a module.
struct Modes {
  bool grad = true;
  bool autocast = false;
  bool autocast_cache = true;
  c10::ScalarType autocast_dtype = c10::ScalarType::BFloat16;

  static Modes current();
  template <typename Archive>
  void fields(Archive& archive) {
    archive(grad, autocast, autocast_cache, autocast_dtype);
  }
};

/// Runs `forward` of a module. Its tensors are values of the receiving rank; the rest of the arguments is in `tree`.
struct Call {
  std::int32_t module = 0;
  ValueId call = 0;
  ValueId results = 0;  // result k is named results + (k << kRankBits)
  std::string tree;
  std::vector<ValueId> inputs;
  std::vector<std::uint8_t> wants;  // which inputs need a gradient
  Modes modes;
  std::string training;          // a byte for each module of the subtree
  std::int64_t ticket = -1;      // position among the calls of a module with buffers in this context; -1: any order
  std::uint64_t context = 0;     // the containers, from the step function down, whose frame calls
  bool report = false;           // the issuer does not know yet what comes out, and waits for it
  std::uint64_t expected = 0;    // else: hash of the report that it relies on
  std::vector<ValueId> mutated;  // inputs that the call is known to change in place

  template <typename Archive>
  void fields(Archive& archive) {
    archive(module, call, results, tree, inputs, wants);
    modes.fields(archive);
    archive(training, ticket, context, report, expected, mutated);
  }
};

/// One aten operator of a frame's glue, run where its operands lie.
struct Op {
  std::string name;
  std::string overload;
  std::string arguments;  // encoded by operators.cpp, values by id
  std::vector<ValueId> values;
  std::vector<ValueId> mutated;
  std::vector<ValueId> results;  // 0 for a result nobody can see
  ValueId reply = 0;  // not 0: what comes out depends on data; results are named results[0] + (k << kRankBits), and the
                      // issuer waits

  template <typename Archive>
  void fields(Archive& archive) {
    archive(name, overload, arguments, values, mutated, results, reply);
  }
};

/// Runs real autograd of one call, and stores the gradients of its inputs.
struct Backward {
  ValueId call = 0;
  std::int32_t module = 0;
  std::vector<ValueId> gradients;  // one for each output; 0: none
  std::vector<ValueId> results;    // one for each input; 0: not wanted
  std::int64_t pass = 0;           // the user's call of backward that this belongs to
  bool keep_graph = false;
  bool accumulate = true;  // into .grad of parameters; autograd.grad does not

  template <typename Archive>
  void fields(Archive& archive) {
    archive(call, module, gradients, results, pass, keep_graph, accumulate);
  }
};

/// A parameter that a frame uses outside its module enters as a value of its home; its gradient comes back as
/// Accumulate.
struct Lift {
  std::int32_t parameter = 0;
  ValueId record = 0;
  ValueId value = 0;

  template <typename Archive>
  void fields(Archive& archive) {
    archive(parameter, record, value);
  }
};

/// Backward of a lifted parameter or local tensor.
struct Accumulate {
  ValueId record = 0;
  ValueId gradient = 0;
  std::int64_t pass = 0;
  bool keep_graph = false;

  template <typename Archive>
  void fields(Archive& archive) {
    archive(record, gradient, pass, keep_graph);
  }
};

/// Copies a value to a rank (which may be the same one) under a new name.
struct Send {
  ValueId value = 0;
  std::int32_t destination = 0;
  ValueId copy = 0;

  template <typename Archive>
  void fields(Archive& archive) {
    archive(value, destination, copy);
  }
};

/// Gives a value of a container's frame the name that the caller expects.
struct Alias {
  ValueId value = 0;
  ValueId name = 0;

  template <typename Archive>
  void fields(Archive& archive) {
    archive(value, name);
  }
};

/// Last of a lane. Runs when all before it ran and the frames that they opened are done; answers DONE to the frame's
/// rank.
struct End {
  bool closes = false;  // of the outermost frame: nothing of the microbatch can come after it, as CLOSE says otherwise

  template <typename Archive>
  void fields(Archive& archive) {
    archive(closes);
  }
};

/// The microbatch is finished on every rank: no contribution to a gradient can come any more.
struct Close {
  template <typename Archive>
  void fields(Archive&) {}
};

using Body = std::variant<Call, Op, Backward, Lift, Accumulate, Send, Alias, End, Close>;

struct Instruction {
  FrameId frame = 0;
  std::int32_t issuer = 0;
  std::int32_t microbatch = 0;
  std::uint32_t step = 0;
  bool outermost = false;          // issued by the step function itself
  std::vector<FrameId> ancestors;  // frames that wait for the issuing frame; empty for the outermost
  std::uint64_t key = 0;           // of the random numbers that it draws; 0: it draws none
  Body body;

  void encode(Writer& writer) const;
  static Instruction decode(Reader& reader);

  /// Values and calls of the receiving rank that must be there before it runs.
  [[nodiscard]] std::vector<ValueId> needs() const;
  /// Values that it changes in place.
  [[nodiscard]] const std::vector<ValueId>* mutated() const;
  /// Names that it gives to what it makes, on whatever rank: the first of each run of names, and how many there are at
  /// most.
  [[nodiscard]] std::vector<std::pair<ValueId, std::uint64_t>> makes() const;
  /// "CALL", "OP", ... as in traces and messages.
  [[nodiscard]] const char* name() const;
};

}  // namespace smp::pipeline
