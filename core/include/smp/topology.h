#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// The groups that a rank belongs to. In each, the rank within the group is the index among its sorted world ranks.
enum class GroupKind {
  kWorld,
  kModel,        ///< MP: one complete model; pipeline times tensor ranks
  kData,         ///< DP: the ranks with the same pipeline rank; tensor times reduced data ranks
  kPipeline,     ///< PP: the partitions of one replica
  kTensor,       ///< TP: peers that split modules among themselves
  kReducedData,  ///< RDP: the ranks that hold the same parameters
};

/// Where one rank stands among all: how world ranks map to pipeline (P), tensor (T) and reduced data (D) ranks.
///
/// The placement names the three letters from the slowest to the fastest varying over consecutive world ranks, or
/// is "cluster" (DPT) or "spread" (TPD). With all degrees 2, DPT gives rank = 4 rdp + 2 pp + tp.
/// Identities: pp x tp x rdp = size, mp = pp x tp, dp = tp x rdp.
///
/// A plain value: nothing here blocks or communicates.
class Topology {
 public:
  /// Throws UsageError when a degree is below 1, the size is no multiple of pipeline_degree * tensor_degree, the
  /// rank is not in [0, size), or the placement is unknown.
  Topology(int rank, int size, int pipeline_degree, int tensor_degree, std::string_view placement);

  /// World ranks of the group of this rank, ascending.
  [[nodiscard]] std::vector<int> group(GroupKind kind) const;
  /// Rank of this rank within its group, and the number of ranks there.
  [[nodiscard]] int rank(GroupKind kind) const;
  [[nodiscard]] int size(GroupKind kind) const;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] int pp_rank() const { return rank(GroupKind::kPipeline); }
  [[nodiscard]] int pp_size() const { return size(GroupKind::kPipeline); }
  [[nodiscard]] int tp_rank() const { return rank(GroupKind::kTensor); }
  [[nodiscard]] int tp_size() const { return size(GroupKind::kTensor); }
  [[nodiscard]] int rdp_rank() const { return rank(GroupKind::kReducedData); }
  [[nodiscard]] int rdp_size() const { return size(GroupKind::kReducedData); }
  [[nodiscard]] int dp_rank() const { return rank(GroupKind::kData); }
  [[nodiscard]] int dp_size() const { return size(GroupKind::kData); }
  [[nodiscard]] int mp_rank() const { return rank(GroupKind::kModel); }
  [[nodiscard]] int mp_size() const { return size(GroupKind::kModel); }

 private:
  /// One dimension of the grid of ranks: moving by one along it changes the world rank by `stride`.
  struct Axis {
    int degree = 1;
    int stride = 1;
  };
  static constexpr std::string_view kLetters = "PTD";
  using Axes = std::array<Axis, kLetters.size()>;  // in the order of kLetters

  /// Letters of the axes along which the members of a group differ.
  static std::string_view letters_of(GroupKind kind);
  static Axes make_axes(int size, int pipeline_degree, int tensor_degree, std::string_view placement);

  int rank_;
  int size_;
  Axes axes_;
};

}  // namespace smp
