#include "smp/pipeline/lanes.h"

#include <algorithm>

#include "smp/pipeline/trace.h"

namespace smp::pipeline {
namespace {

Urgency urgency_of(const Instruction& instruction) {
  const auto& body = instruction.body;
  if (std::holds_alternative<Call>(body)) {
    return Urgency::kForward;
  }
  if (std::holds_alternative<Op>(body) || std::holds_alternative<Lift>(body)) {
    return Urgency::kOperator;
  }
  if (std::holds_alternative<Backward>(body) || std::holds_alternative<Accumulate>(body)) {
    return Urgency::kBackward;
  }
  return Urgency::kTransfer;
}

/// What instructions of one cost have in common.
std::pair<std::size_t, std::int32_t> cost_key(const Instruction& instruction) {
  const auto* call = std::get_if<Call>(&instruction.body);
  const auto* backward = std::get_if<Backward>(&instruction.body);
  return {instruction.body.index(), call != nullptr ? call->module : backward != nullptr ? backward->module : -1};
}

}  // namespace

double Lanes::cost_ms(const Instruction& instruction) const {
  const auto known = costs_ms_.find(cost_key(instruction));
  return known == costs_ms_.end() ? kUnknownCost : known->second;
}

bool Lanes::feeds(const Instruction& instruction) const {
  return std::holds_alternative<Call>(instruction.body) && !held_.contains(instruction.microbatch) &&
         static_cast<std::int32_t>(held_.size()) < pipeline_depth(partition_, partitions_);
}

void Lanes::push(Instruction instruction) {
  auto needs = instruction.needs();
  auto& lane = lanes_[instruction.frame];
  lane.items.push_back({std::move(instruction), std::move(needs), arrivals_++, trace_clock_ns()});
}

bool Lanes::can_run(const Lane& lane, const ValueTable& values) const {
  const auto& instruction = lane.items.front().instruction;
  const auto& needs = lane.items.front().needs;
  if (!std::all_of(needs.begin(), needs.end(), [&](ValueId id) { return values.ready(id); })) {
    return false;
  }
  if (std::holds_alternative<End>(instruction.body)) {
    return lane.open_nested == 0;
  }
  if (const auto* call = std::get_if<Call>(&instruction.body)) {
    if (instruction.microbatch >= admission_limit(policy_, lowest_unfinished_, partition_, partitions_)) {
      return false;
    }
    if (call->ticket >= 0) {
      const auto next = next_ticket_.find({call->module, call->context});
      if (call->ticket != (next == next_ticket_.end() ? 0 : next->second)) {
        return false;
      }
    }
  }
  if (values.has_writers()) {
    auto own = instruction.ancestors;
    own.push_back(instruction.frame);
    if (std::any_of(needs.begin(), needs.end(), [&](ValueId id) { return values.written_beyond(id, own); })) {
      return false;
    }
  }
  if (const auto* mutated = instruction.mutated(); mutated != nullptr && !mutated->empty()) {
    // In place on a value that another open frame may still read: it waits for that frame.
    auto own = instruction.ancestors;
    own.push_back(instruction.frame);
    return std::none_of(mutated->begin(), mutated->end(), [&](ValueId id) { return values.lent_beyond(id, own); });
  }
  return true;
}

std::optional<Instruction> Lanes::take(const ValueTable& values) {
  std::vector<Candidate> candidates;
  std::vector<Lane*> lanes;
  for (auto& [frame, lane] : lanes_) {
    if (lane.busy || lane.items.empty() || !can_run(lane, values)) {
      continue;
    }
    const auto& head = lane.items.front();
    candidates.push_back({urgency_of(head.instruction), head.instruction.microbatch, head.arrival,
                          cost_ms(head.instruction), frame == last_lane_, feeds(head.instruction)});
    lanes.push_back(&lane);
  }
  if (candidates.empty()) {
    return std::nullopt;
  }
  auto& lane = *lanes[choose(policy_, candidates)];
  lane.busy = true;
  auto instruction = std::move(lane.items.front().instruction);
  lane.items.pop_front();
  return instruction;
}

void Lanes::finish(const Instruction& instruction, double took_ms) {
  constexpr double kWeight = 0.25;  // of the newest
  const auto [cost, is_new] = costs_ms_.try_emplace(cost_key(instruction), took_ms);
  if (!is_new) {
    cost->second += kWeight * (took_ms - cost->second);
  }
  longest_ms_ = std::max(longest_ms_, cost->second);
  const bool brief = is_brief(cost->second, longest_ms_);
  if (std::holds_alternative<Call>(instruction.body) && !brief) {
    held_.insert(instruction.microbatch);
  }
  const auto it = lanes_.find(instruction.frame);
  if (it == lanes_.end()) {
    return;  // cleared meanwhile
  }
  it->second.busy = false;
  if (urgency_of(instruction) != Urgency::kTransfer && !brief) {
    last_lane_ = instruction.frame;
  }
  if (const auto* call = std::get_if<Call>(&instruction.body); call != nullptr && call->ticket >= 0) {
    next_ticket_[{call->module, call->context}] = call->ticket + 1;
  }
  if (std::holds_alternative<End>(instruction.body)) {
    lanes_.erase(it);
    if (instruction.outermost) {
      held_.erase(instruction.microbatch);
      finished_.insert(instruction.microbatch);
      while (finished_.erase(lowest_unfinished_) > 0) {
        ++lowest_unfinished_;
      }
    }
  } else if (std::holds_alternative<Close>(instruction.body) && it->second.items.empty()) {
    lanes_.erase(it);
  }
}

void Lanes::close_nested(FrameId parent) {
  const auto it = lanes_.find(parent);
  if (it != lanes_.end()) {
    --it->second.open_nested;
  }
}

void Lanes::start_step() {
  lowest_unfinished_ = 0;
  finished_.clear();
  held_.clear();
  longest_ms_ = 0;  // anew, since a first run takes longer than all others
  for (const auto& [key, cost] : costs_ms_) {
    longest_ms_ = std::max(longest_ms_, cost);
  }
  next_ticket_.clear();
}

std::vector<Instruction> Lanes::clear() {
  std::vector<Instruction> dropped;
  for (auto& [frame, lane] : lanes_) {
    for (auto& item : lane.items) {
      dropped.push_back(std::move(item.instruction));
    }
  }
  lanes_.clear();
  start_step();
  return dropped;
}

std::size_t Lanes::size() const {
  std::size_t count = 0;
  for (const auto& [frame, lane] : lanes_) {
    count += lane.items.size() + (lane.busy ? 1 : 0);
  }
  return count;
}

std::vector<Lanes::Waiting> Lanes::waiting(const ValueTable& values) const {
  std::vector<Waiting> result;
  for (const auto& [frame, lane] : lanes_) {
    for (const auto& item : lane.items) {
      const bool first = &item == &lane.items.front() && !lane.busy;
      result.push_back({&item.instruction, item.arrived_ns, first, {}});
      if (first) {
        std::copy_if(item.needs.begin(), item.needs.end(), std::back_inserter(result.back().missing),
                     [&](ValueId id) { return !values.ready(id); });
      }
    }
  }
  return result;
}

}  // namespace smp::pipeline
