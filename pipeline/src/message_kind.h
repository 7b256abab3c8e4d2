// First byte of every message on the engine's channel.
#pragma once

#include <cstdint>

namespace smp::pipeline {

enum class MessageKind : std::uint8_t {
  kInstruction,
  kValue,    // a tensor; its bytes are the payload
  kRelease,  // values and calls that the sender needs no more
  kReply,    // what came out of a call or an operator
  kDone,     // a lane of the receiver's frame has ended
  kStepBegin,
  kStepEnd,
  kAbort,
  kLeave,  // the sender's engine closes
  kStatusRequest,
  kStatus,
};

}  // namespace smp::pipeline
