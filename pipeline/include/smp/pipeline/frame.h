// A frame: running code that issues instructions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "smp/pipeline/instruction.h"

namespace smp::pipeline {

class Engine;

/// The step function of one microbatch, or the body of a CALL or BACKWARD of a container. One thread at a time runs in
/// a frame.
struct Frame {
  /// A tensor goes to a rank once in a frame; the entry is worthless when its source has died.
  struct Moved {
    c10::weak_intrusive_ptr<c10::TensorImpl> source;
    std::uint32_t version;
    int home;
    bool grad_mode;
    at::Tensor copy;
  };

  Engine* engine = nullptr;
  FrameId id = 0;
  std::int32_t microbatch = 0;
  std::uint32_t step = 0;
  bool outermost = false;
  FrameId parent = 0;  // lane of the instruction that opened it
  std::vector<FrameId> ancestors;
  std::uint64_t context = 0;         // of the calls that it issues
  std::int64_t pass = 0;             // that the BACKWARD which opened it belongs to; 0: its own calls of backward count
  std::vector<ValueId> borrowed;     // values of this rank that it was lent
  std::vector<std::uint8_t> issued;  // for each rank: did it get an instruction
  int open_lanes = 0;                // DONEs that are still to come after the end
  std::vector<Moved> moved;
  bool accumulate = true;      // of the BACKWARD which opened it
  bool nests = false;          // outermost: backward work of it opens frames, which may use any rank
  std::uint64_t key = 0;       // of its random numbers
  std::uint64_t num_keys = 0;  // given to instructions of backward
};

/// The frame of this thread, or null: then module calls run directly, and remote tensors can't be used.
Frame* current_frame();

/// Makes a frame (or none) the current one of this thread for a scope.
class FrameScope {
 public:
  explicit FrameScope(Frame* frame);
  ~FrameScope();
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;

 private:
  Frame* previous_;
};

}  // namespace smp::pipeline
