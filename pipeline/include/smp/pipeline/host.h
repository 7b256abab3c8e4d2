// What the engine needs from whoever runs modules: Python in the product, C++ functions in its tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace smp::pipeline {

/// What went wrong, where. Travels to all ranks, so that each can say it.
struct Failure {
  std::uint32_t step = 0;
  std::int32_t rank = -1;
  std::int32_t microbatch = -1;
  std::string where;         // "CALL of transformer.h.3"
  std::string message;       // text of the exception, with its traceback where there is one
  std::string payload;       // the host's own form of the exception; may be empty
  bool stall = false;        // nothing moved any more: what still runs may never end
  std::int32_t varies = -1;  // module whose results differ from call to call: it is asked each time from now on

  template <typename Archive>
  void fields(Archive& archive) {
    archive(step, rank, microbatch, where, message, payload, stall, varies);
  }
  [[nodiscard]] std::string describe() const;
};

/// Runs modules, and adapts the engine's threads to the language that modules are written in. Methods are called from
/// the engine's threads and from issuing threads, never under an engine lock.
class Host {
 public:
  struct Outcome {
    std::string tree;
    std::vector<at::Tensor> outputs;
  };

  Host() = default;
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  virtual ~Host() = default;

  /// Runs `forward` of a module, whatever it throws. `training` holds a byte for each module of its subtree.
  virtual Outcome run(std::int32_t module, const std::string& tree, std::vector<at::Tensor> inputs,
                      const std::string& training) = 0;

  /// Fills message and payload from an exception that left run() or autograd.
  virtual void describe(const std::exception_ptr& error, Failure& failure);

  /// Called about every 50 ms by an issuing thread that waits; may throw (signals).
  virtual void check_interrupt() {}

  /// Throws what makes the running frame unwind after another rank failed.
  [[noreturn]] virtual void throw_aborted(const Failure& failure);

  /// Around everything that blocks: give up / take back a lock of the language's interpreter that this thread may hold.
  virtual void* leave_interpreter() { return nullptr; }
  virtual void enter_interpreter(void* /*state*/) {}
};

}  // namespace smp::pipeline
