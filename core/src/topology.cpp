#include <smp/error.h>
#include <smp/topology.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace smp {

namespace {

/// Letters from the slowest to the fastest axis.
std::string_view placement_letters(std::string_view placement) {
  if (placement == "cluster") {
    return "DPT";
  }
  if (placement == "spread") {
    return "TPD";
  }
  constexpr std::string_view kSortedLetters = "DPT";
  if (!std::is_permutation(placement.begin(), placement.end(), kSortedLetters.begin(), kSortedLetters.end())) {
    throw_usage(
        "placement_strategy is '{}': it must be 'cluster', 'spread' or the letters D, P and T, each once, in any "
        "order (the right-most varies fastest over consecutive ranks); set one of these",
        placement);
  }
  return placement;
}

}  // namespace

Topology::Topology(int rank, int size, int pipeline_degree, int tensor_degree, std::string_view placement)
    : rank_(rank), size_(size), axes_(make_axes(size, pipeline_degree, tensor_degree, placement)) {
  if (rank < 0 || rank >= size) {
    throw_usage("rank is {}: it must be at least 0 and below the number of ranks, {}", rank, size);
  }
}

Topology::Axes Topology::make_axes(int size, int pipeline_degree, int tensor_degree, std::string_view placement) {
  if (pipeline_degree < 1) {
    throw_usage("the number of partitions is {}: at least 1 is needed; set partitions to 1 or more", pipeline_degree);
  }
  if (tensor_degree < 1) {
    throw_usage("tensor_parallel_degree is {}: at least 1 is needed; set it to 1 or more", tensor_degree);
  }
  const long long model_size = static_cast<long long>(pipeline_degree) * tensor_degree;
  if (size < 1 || size % model_size != 0) {
    throw_usage(
        "this launch has {} rank(s), but one model takes partitions x tensor_parallel_degree = {} x {} = {}: start as "
        "many (torchrun --nproc-per-node {} script.py, or mpirun -np {} python script.py), or change these degrees",
        size, pipeline_degree, tensor_degree, model_size, model_size, model_size);
  }

  Axes axes;
  axes[kLetters.find('P')].degree = pipeline_degree;
  axes[kLetters.find('T')].degree = tensor_degree;
  axes[kLetters.find('D')].degree = static_cast<int>(size / model_size);
  const std::string_view letters = placement_letters(placement);
  int stride = 1;
  for (std::size_t i = letters.size(); i-- > 0;) {
    Axis& axis = axes[kLetters.find(letters[i])];
    axis.stride = stride;
    stride *= axis.degree;
  }
  return axes;
}

std::string_view Topology::letters_of(GroupKind kind) {
  switch (kind) {
    case GroupKind::kWorld:
      return kLetters;
    case GroupKind::kModel:
      return "PT";
    case GroupKind::kData:
      return "TD";
    case GroupKind::kPipeline:
      return "P";
    case GroupKind::kTensor:
      return "T";
    case GroupKind::kReducedData:
      return "D";
  }
  throw_usage("unknown kind of group {}", static_cast<int>(kind));
}

std::vector<int> Topology::group(GroupKind kind) const {
  std::vector<int> members{rank_};
  for (const char letter : letters_of(kind)) {
    const Axis& axis = axes_[kLetters.find(letter)];
    std::vector<int> extended;
    extended.reserve(members.size() * static_cast<std::size_t>(axis.degree));
    for (const int member : members) {
      const int origin = member - (member / axis.stride % axis.degree) * axis.stride;
      for (int i = 0; i < axis.degree; ++i) {
        extended.push_back(origin + i * axis.stride);
      }
    }
    members = std::move(extended);
  }
  std::sort(members.begin(), members.end());
  return members;
}

int Topology::rank(GroupKind kind) const {
  const std::vector<int> members = group(kind);
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank_) - members.begin());
}

int Topology::size(GroupKind kind) const {
  int size = 1;
  for (const char letter : letters_of(kind)) {
    size *= axes_[kLetters.find(letter)].degree;
  }
  return size;
}

}  // namespace smp
