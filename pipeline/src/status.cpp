#include "smp/pipeline/status.h"

#include <algorithm>

#include "smp/format.h"

namespace smp::pipeline {
namespace {

constexpr std::size_t kLongestChain = 32;
constexpr std::size_t kShownValues = 3;

struct Place {
  std::size_t rank = 0;
  const InstructionStatus* instruction = nullptr;
};

/// Which instruction of which rank makes a value.
std::optional<Place> maker_of(ValueId id, const std::vector<std::optional<RankStatus>>& statuses) {
  std::optional<Place> best;
  ValueId best_first = 0;
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    if (!statuses[rank]) {
      continue;
    }
    for (const auto& instruction : statuses[rank]->instructions) {
      for (std::size_t i = 0; i < instruction.makes.size(); ++i) {
        const auto first = instruction.makes[i];
        const bool same_issuer = ((id ^ first) & ((1U << kRankBits) - 1)) == 0;
        const bool inside = id >= first && ((id - first) >> kRankBits) < instruction.counts[i];
        if (same_issuer && inside && first >= best_first) {
          best = Place{rank, &instruction};
          best_first = first;
        }
      }
    }
  }
  return best;
}

std::string name_of(const InstructionStatus& instruction) {
  return formatted("{}, microbatch {}", instruction.what, instruction.microbatch);
}

std::string reason_of(const InstructionStatus& instruction, const std::vector<int>& ranks,
                      const std::vector<std::optional<RankStatus>>& statuses) {
  if (instruction.missing.empty()) {
    return "its turn";
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(instruction.missing.size(), kShownValues); ++i) {
    const auto id = instruction.missing[i];
    text += i == 0 ? "" : ", ";
    text += formatted("value {}.{}", id & ((1U << kRankBits) - 1), id >> kRankBits);
    if (const auto maker = maker_of(id, statuses)) {
      text += formatted(" of {} on rank {}", name_of(*maker->instruction), ranks[maker->rank]);
    } else {
      text += " that no rank which answers is about to make";
    }
  }
  return text;
}

/// From an instruction that waits to what holds it up in the end.
std::string chain_from(Place place, const std::vector<int>& ranks,
                       const std::vector<std::optional<RankStatus>>& statuses) {
  std::string text;
  for (std::size_t i = 0; i < kLongestChain; ++i) {
    text += formatted("{}{} on rank {}", i == 0 ? "" : " waits for ", name_of(*place.instruction), ranks[place.rank]);
    if (place.instruction->running) {
      return text + ", which runs";
    }
    if (place.instruction->missing.empty()) {
      const auto& others = statuses[place.rank]->instructions;
      const auto running = std::find_if(others.begin(), others.end(), [](const auto& x) { return x.running; });
      return text + (running == others.end() ? ", which waits for its turn"
                                             : formatted(", which comes after {}, which runs", name_of(*running)));
    }
    const auto maker = maker_of(place.instruction->missing.front(), statuses);
    if (!maker) {
      return text + " waits for a value that no rank which answers is about to make";
    }
    place = *maker;
  }
  return text + " waits for ...";
}

}  // namespace

std::string explain_stall(const std::vector<int>& ranks, const std::vector<std::optional<RankStatus>>& statuses) {
  std::string text;
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    if (!statuses[i]) {
      text += formatted("  rank {} does not answer: it is stopped, or its process hangs\n", ranks[i]);
      continue;
    }
    const auto& instructions = statuses[i]->instructions;
    text += formatted("  rank {} (partition {}), {} instructions:{}\n", ranks[i], i, instructions.size(),
                      std::none_of(instructions.begin(), instructions.end(), [](const auto& x) { return x.running; })
                          ? " none runs"
                          : "");
    for (const auto& instruction : instructions) {
      if (instruction.running) {
        text += formatted("    {} runs for {:.1f} s\n", name_of(instruction), instruction.seconds);
      } else if (instruction.first) {
        text += formatted("    {} waits for {:.1f} s for {}\n", name_of(instruction), instruction.seconds,
                          reason_of(instruction, ranks, statuses));
      }
    }
  }
  // What holds up the lowest microbatch holds up the others.
  Place start;
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    for (std::size_t k = 0; statuses[i] && k < statuses[i]->instructions.size(); ++k) {
      const auto& instruction = statuses[i]->instructions[k];
      const bool is_lower = start.instruction == nullptr || instruction.microbatch < start.instruction->microbatch;
      if (instruction.first && !instruction.missing.empty() && is_lower) {
        start = {i, &instruction};
      }
    }
  }
  return start.instruction == nullptr ? text : text + "  " + chain_from(start, ranks, statuses);
}

}  // namespace smp::pipeline
