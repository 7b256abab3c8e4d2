// What a rank is doing, and the explanation of a stall that the statuses of all ranks give together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "smp/pipeline/remote_tensor.h"

namespace smp::pipeline {

/// An instruction that has not finished.
struct InstructionStatus {
  std::string what;  // "CALL of module 'h.3'"
  std::int32_t microbatch = 0;
  double seconds = 0;  // since it began to run, or arrived
  bool running = false;
  bool first = false;                 // of its lane: what is behind it waits for it
  std::vector<ValueId> missing;       // values and calls that it needs and that are not there
  std::vector<ValueId> makes;         // first name of each run of names that it gives to what it makes
  std::vector<std::uint64_t> counts;  // and how many names each run has at most

  template <typename Archive>
  void fields(Archive& archive) {
    archive(what, microbatch, seconds, running, first, missing, makes, counts);
  }
};

struct RankStatus {
  double quiet_seconds = 0;  // since an instruction began, ended or arrived
  std::vector<InstructionStatus> instructions;

  template <typename Archive>
  void fields(Archive& archive) {
    archive(quiet_seconds);
    std::uint64_t count = instructions.size();
    archive(count);
    instructions.resize(count);
    for (auto& instruction : instructions) {
      instruction.fields(archive);
    }
  }
};

/// Who waits for what, over all ranks, as text of several lines. `ranks[i]` is the rank of `statuses[i]`; without
/// value: it did not answer.
std::string explain_stall(const std::vector<int>& ranks, const std::vector<std::optional<RankStatus>>& statuses);

}  // namespace smp::pipeline
