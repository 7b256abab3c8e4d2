#include "smp/pipeline/frame.h"

#include <algorithm>
#include <utility>

#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/engine.h"

namespace smp::pipeline {
namespace {

thread_local Frame* tls_frame = nullptr;

}  // namespace

Frame* current_frame() { return tls_frame; }

FrameScope::FrameScope(Frame* frame) : previous_(std::exchange(tls_frame, frame)) {}

FrameScope::~FrameScope() { tls_frame = previous_; }

// ---- frames of an engine

std::shared_ptr<Frame> Engine::open_frame(const Instruction& by) {
  auto frame = std::make_shared<Frame>();
  frame->engine = this;
  frame->id = new_ids();
  frame->microbatch = by.microbatch;
  frame->step = by.step;
  frame->key = by.key;
  frame->parent = by.frame;
  frame->ancestors = by.ancestors;
  frame->ancestors.push_back(by.frame);
  if (const auto* call = std::get_if<Call>(&by.body)) {
    frame->context = call->context * (options_.modules.size() + 1) + static_cast<std::uint64_t>(call->module) + 1;
  }
  frame->issued.assign(options_.peers.size(), 0);
  const auto lock = tables_of(by.step);
  frames_[frame->id] = frame;
  lanes_.open_nested(by.frame);
  return frame;
}

void Engine::close_frame(const std::shared_ptr<Frame>& frame) {
  frame->moved.clear();
  flush_releases();
  {
    const auto lock = tables_of(frame->step);
    frame->open_lanes = static_cast<int>(std::count(frame->issued.begin(), frame->issued.end(), 1));
  }
  if (frame->open_lanes == 0) {
    frame_done(frame->id);
    return;
  }
  const bool closes = frame->outermost && !nested_frames_ && !frame->nests;
  const FrameScope scope(frame.get());
  const auto lanes = frame->issued;
  for (std::size_t home = 0; home < lanes.size(); ++home) {
    if (lanes[home] != 0) {
      issue(static_cast<int>(home), End{closes});
    }
  }
}

void Engine::frame_done(FrameId id) {
  std::shared_ptr<Frame> frame;
  std::optional<Instruction> close;
  {
    const std::lock_guard lock(mutex_);
    const auto it = frames_.find(id);
    if (it == frames_.end() || it->second->step <= failed_step_) {
      return;
    }
    if (it->second->open_lanes > 0 && --it->second->open_lanes > 0) {
      return;
    }
    frame = std::move(it->second);
    frames_.erase(it);
    if (!frame->outermost) {
      lanes_.close_nested(frame->parent);
      for (auto value : frame->borrowed) {
        values_.give_back(value, frame->id);
      }
    }
    if (frame->outermost && (nested_frames_ || frame->nests)) {
      close = Instruction{frame->id, transport_->rank(), frame->microbatch, frame->step, true, {}, 0, Close{}};
      lanes_.push(*close);
    }
    changed_.notify_all();
  }
  if (!frame->outermost) {
    return;
  }
  if (close) {
    Writer header;
    header(MessageKind::kInstruction);
    close->encode(header);
    send_to_others(header);
  }
  // Only now may the step end: its end must not overtake CLOSE, which another rank would take for one of the next step.
  const std::lock_guard lock(mutex_);
  if (frame->step > failed_step_) {
    --open_microbatches_;
    changed_.notify_all();
  }
}

Frame& Engine::here() const {
  auto* frame = current_frame();
  if (frame == nullptr || frame->engine != this) {
    throw_usage(
        "a tensor that lives on another partition was used outside a step: return it from the @smp.step function, or "
        "read it inside (.item())");
  }
  return *frame;
}

}  // namespace smp::pipeline
