#include "smp/pipeline/frame.h"

#include <utility>

namespace smp::pipeline {
namespace {

thread_local Frame* tls_frame = nullptr;

}  // namespace

Frame* current_frame() { return tls_frame; }

FrameScope::FrameScope(Frame* frame) : previous_(std::exchange(tls_frame, frame)) {}

FrameScope::~FrameScope() { tls_frame = previous_; }

}  // namespace smp::pipeline
