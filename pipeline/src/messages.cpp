// What the engines of different ranks say to each other.
#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/trace.h"

namespace smp::pipeline {
namespace {

TraceEvent transfer(TraceKind kind, std::int64_t begin_ns, std::int32_t track, ValueId id, int peer,
                    std::int64_t bytes) {
  TraceEvent event{kind, kind == TraceKind::kSend ? "send" : "receive", begin_ns, trace_clock_ns(), track};
  event.id = id;
  event.peer = peer;
  event.bytes = bytes;
  return event;
}

}  // namespace

void Engine::send(int home, const Writer& header, at::Tensor payload) {
  Writer framed;
  framed(options_.generation);
  transport_->send(options_.peers[static_cast<std::size_t>(home)],
                   {kEngineChannel, framed.take() + header.bytes(), std::move(payload)});
}

void Engine::send_to_others(const Writer& header) {
  for (int home = 0; home < partitions(); ++home) {
    if (home != partition_) {
      send(home, header);
    }
  }
}

void Engine::send_value(std::uint32_t step, int home, ValueId id, const at::Tensor& x) {
  const auto begin = trace_clock_ns();
  auto meta = travelled(TensorMeta::of(x));
  meta.requires_grad = false;
  auto bytes = pack(x);
  if (home == partition_) {
    store(step, id, unpack(bytes, meta));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    counts_.moved_bytes += bytes.numel();
    ++counts_.moved_values;
  }
  Writer header;
  header(MessageKind::kValue, step, id);
  meta.fields(header);
  const auto size = bytes.numel();
  send(home, header, std::move(bytes));
  if (trace().on()) {
    trace().record(transfer(TraceKind::kSend, begin, trace_track(), id, home, size));
  }
}

void Engine::receive(int source, Message message) {
  const std::lock_guard receiving(receive_mutex_);
  take(source, std::move(message));
}

/// A rank that is ahead may send what belongs to the next step before this rank has left (or failed) its own. Such
/// messages wait, so that tables, lanes and failures are always those of one step.
bool Engine::keep_early(std::uint32_t step, int source, Message& message) {
  const std::lock_guard lock(mutex_);
  if (step <= entered_step_) {
    return false;
  }
  early_.emplace_back(source, std::move(message));
  return true;
}

void Engine::take(int source, Message message) {
  Reader reader(message.header);
  if (reader.get<std::uint32_t>() != options_.generation) {
    return;
  }
  const auto kind = reader.get<MessageKind>();
  if (kind != MessageKind::kStatusRequest && kind != MessageKind::kStatus) {
    made_progress();
  }
  Leftovers leftovers;
  switch (kind) {
    case MessageKind::kInstruction: {
      auto instruction = Instruction::decode(reader);
      if (keep_early(instruction.step, source, message)) {
        return;
      }
      const auto needs = instruction.needs();
      const std::lock_guard lock(mutex_);
      if (instruction.step > failed_step_) {
        for (auto id : needs) {
          values_.pin(id);
        }
        lanes_.push(std::move(instruction));
        changed_.notify_all();
      }
      return;
    }
    case MessageKind::kValue: {
      const auto step = reader.get<std::uint32_t>();
      if (keep_early(step, source, message)) {
        return;
      }
      const auto begin = trace_clock_ns();
      const auto id = reader.get<ValueId>();
      TensorMeta meta;
      meta.fields(reader);
      auto data = unpack(message.payload, meta);
      const std::lock_guard lock(mutex_);
      if (step > failed_step_) {
        values_.store(id, std::move(data), leftovers.values);
        changed_.notify_all();
      }
      if (trace().on()) {
        trace().record(
            transfer(TraceKind::kReceive, begin, kArrivalTrack, id, partition_of(source), message.payload.numel()));
      }
      return;
    }
    case MessageKind::kRelease: {
      const auto step = reader.get<std::uint32_t>();
      if (keep_early(step, source, message)) {
        return;
      }
      const auto ids = reader.get<std::vector<ValueId>>();
      {
        const std::lock_guard lock(mutex_);
        if (step > failed_step_) {
          for (auto id : ids) {
            values_.release(id, leftovers.values);
          }
          changed_.notify_all();
        }
      }
      leftovers = {};
      flush_releases();  // what went may have held values elsewhere
      return;
    }
    case MessageKind::kReply: {
      const auto step = reader.get<std::uint32_t>();
      const auto id = reader.get<ValueId>();
      auto bytes = reader.get<std::string>();
      const std::lock_guard lock(mutex_);
      if (step > failed_step_) {
        replies_[id] = std::move(bytes);
        changed_.notify_all();
      }
      return;
    }
    case MessageKind::kDone:
      frame_done(reader.get<FrameId>());
      return;
    case MessageKind::kStepBegin:
    case MessageKind::kStepEnd: {
      const auto step = reader.get<std::uint32_t>();
      const std::lock_guard lock(mutex_);
      if (step > failed_step_) {  // else nobody will take it
        (kind == MessageKind::kStepBegin ? begun_steps_ : ended_steps_)[step] = reader.get<std::string>();
        changed_.notify_all();
      }
      return;
    }
    case MessageKind::kAbort: {
      Failure failure;
      failure.fields(reader);
      if (keep_early(failure.step, source, message)) {
        return;
      }
      const std::lock_guard lock(mutex_);
      if (failure.step > failed_step_ && failure.step == entered_step_) {  // else this rank is past that step
        fail_locked(std::move(failure), leftovers);
      }
      return;
    }
    case MessageKind::kStatusRequest: {
      const auto serial = reader.get<std::uint64_t>();
      auto answer = status();
      Writer header;
      header(MessageKind::kStatus, serial);
      answer.fields(header);
      send(partition_of(source), header);
      return;
    }
    case MessageKind::kStatus: {
      const auto serial = reader.get<std::uint64_t>();
      RankStatus answer;
      answer.fields(reader);
      const std::lock_guard lock(mutex_);
      if (serial == status_serial_) {
        answers_[partition_of(source)] = std::move(answer);
        changed_.notify_all();
      }
      return;
    }
    case MessageKind::kLeave: {
      const auto completed = reader.get<std::uint32_t>();
      peer_left(source, completed,
                formatted("rank {} has left after {} steps: every rank must run the same steps", source, completed));
      return;
    }
  }
}

void Engine::peer_left(int rank, std::uint32_t completed_steps, const std::string& reason) {
  Leftovers leftovers;
  const std::lock_guard lock(mutex_);
  Failure failure;
  failure.rank = rank;
  failure.message = reason;
  if (!left_ || completed_steps < left_->first) {
    left_ = {completed_steps, failure};
  }
  if (in_step_ && completed_steps < entered_step_ && entered_step_ > failed_step_) {
    fail_locked(as_of_now(std::move(failure)), leftovers);
  }
}

/// The failure of the step that this rank is in, which a peer that has left can't take part in.
Failure Engine::as_of_now(Failure left) const {
  left.step = entered_step_;
  left.message += formatted(" (rank {} is in step {})", transport_->rank(), entered_step_);
  return left;
}

void Engine::flush_releases() {
  while (true) {
    std::map<int, std::vector<ValueId>> elsewhere;
    ValueTable::Trash trash;
    std::uint32_t step = 0;
    {
      const std::lock_guard lock(mutex_);
      if (releases_->empty()) {
        return;
      }
      step = entered_step_;
      for (const auto& [home, id, borrowed] : releases_->take()) {
        if (borrowed) {
          values_.unpin(id, trash);
        } else if (home == partition_) {
          values_.release(id, trash);
        } else {
          elsewhere[home].push_back(id);
        }
      }
      if (!trash.empty()) {
        changed_.notify_all();
      }
    }
    for (const auto& [home, ids] : elsewhere) {
      Writer header;
      header(MessageKind::kRelease, step, ids);
      send(home, header);
    }
  }
}

}  // namespace smp::pipeline
