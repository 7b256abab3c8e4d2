#include <gtest/gtest.h>
#include <smp/error.h>
#include <smp/topology.h>

#include <string>
#include <string_view>
#include <vector>

namespace smp {
namespace {

using Groups = std::vector<std::vector<int>>;

/// The groups of one kind, each once, in the order of their lowest ranks.
Groups groups(int size, int pipeline_degree, int tensor_degree, std::string_view placement, GroupKind kind) {
  Groups result;
  for (int rank = 0; rank < size; ++rank) {
    const auto group = Topology(rank, size, pipeline_degree, tensor_degree, placement).group(kind);
    if (group.front() == rank) {
      result.push_back(group);
    }
  }
  return result;
}

std::string usage_message(int rank, int size, int pipeline_degree, int tensor_degree, std::string_view placement) {
  try {
    const Topology topology(rank, size, pipeline_degree, tensor_degree, placement);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

const std::vector<std::string_view> kPlacements = {"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"};
const std::vector<GroupKind> kKinds = {GroupKind::kWorld,    GroupKind::kModel,  GroupKind::kData,
                                       GroupKind::kPipeline, GroupKind::kTensor, GroupKind::kReducedData};

TEST(Topology, cluster_keeps_the_partitions_of_a_replica_together) {
  EXPECT_EQ(groups(8, 2, 1, "cluster", GroupKind::kModel), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(groups(8, 2, 1, "cluster", GroupKind::kData), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
}

TEST(Topology, spread_keeps_the_replicas_of_a_partition_together) {
  EXPECT_EQ(groups(8, 2, 1, "spread", GroupKind::kModel), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(groups(8, 2, 1, "spread", GroupKind::kData), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(Topology, right_most_letter_varies_fastest) {
  for (int rank = 0; rank < 8; ++rank) {
    const Topology dpt(rank, 8, 2, 2, "DPT");
    EXPECT_EQ(4 * dpt.rdp_rank() + 2 * dpt.pp_rank() + dpt.tp_rank(), rank);
    const Topology ptd(rank, 8, 2, 2, "PTD");
    EXPECT_EQ(4 * ptd.pp_rank() + 2 * ptd.tp_rank() + ptd.rdp_rank(), rank);
    const Topology dtp(rank, 8, 2, 2, "DTP");
    EXPECT_EQ(4 * dtp.rdp_rank() + 2 * dtp.tp_rank() + dtp.pp_rank(), rank);
  }
}

TEST(Topology, degrees_that_differ_give_the_mixed_radix_number) {
  for (int rank = 0; rank < 24; ++rank) {
    const Topology topology(rank, 24, 3, 4, "TDP");  // pp 3, tp 4, rdp 2
    EXPECT_EQ((topology.tp_rank() * 2 + topology.rdp_rank()) * 3 + topology.pp_rank(), rank);
  }
}

TEST(Topology, names_are_aliases_of_letters) {
  for (const GroupKind kind : kKinds) {
    EXPECT_EQ(groups(16, 4, 2, "cluster", kind), groups(16, 4, 2, "DPT", kind));
    EXPECT_EQ(groups(16, 4, 2, "spread", kind), groups(16, 4, 2, "TPD", kind));
  }
}

TEST(Topology, identities_hold_for_every_placement) {
  for (const std::string_view placement : kPlacements) {
    for (int rank = 0; rank < 24; ++rank) {
      const Topology topology(rank, 24, 3, 2, placement);
      EXPECT_EQ(topology.pp_size() * topology.tp_size() * topology.rdp_size(), 24);
      EXPECT_EQ(topology.mp_size() * topology.rdp_size(), 24);
      EXPECT_EQ(topology.pp_size() * topology.dp_size(), 24);
      EXPECT_EQ(topology.dp_size(), topology.tp_size() * topology.rdp_size());
      EXPECT_EQ(topology.size(), 24);
      EXPECT_EQ(topology.rank(), rank);
    }
  }
}

TEST(Topology, groups_of_a_kind_split_the_world_and_rank_is_the_index_in_them) {
  for (const std::string_view placement : kPlacements) {
    for (const GroupKind kind : kKinds) {
      std::vector<int> seen(24, 0);
      for (int rank = 0; rank < 24; ++rank) {
        const Topology topology(rank, 24, 3, 2, placement);
        const auto group = topology.group(kind);
        EXPECT_EQ(static_cast<int>(group.size()), topology.size(kind));
        EXPECT_EQ(group.at(static_cast<std::size_t>(topology.rank(kind))), rank);
        ++seen[static_cast<std::size_t>(group.front())];
        EXPECT_EQ(Topology(group.front(), 24, 3, 2, placement).group(kind), group);
      }
      for (const int count : seen) {
        EXPECT_TRUE(count == 0 || count == Topology(0, 24, 3, 2, placement).size(kind));
      }
    }
  }
}

TEST(Topology, one_rank_is_alone_in_every_group) {
  const Topology topology(0, 1, 1, 1, "cluster");
  for (const GroupKind kind : kKinds) {
    EXPECT_EQ(topology.group(kind), std::vector<int>{0});
  }
}

TEST(Topology, a_world_that_does_not_fit_is_refused_with_the_numbers) {
  const std::string message = usage_message(0, 6, 2, 2, "cluster");
  EXPECT_NE(message.find("launch has 6 rank"), std::string::npos) << message;
  EXPECT_NE(message.find("2 x 2 = 4"), std::string::npos) << message;
  EXPECT_NE(usage_message(0, 1, 2, 1, "cluster").find("mpirun -np 2 python"), std::string::npos);
  EXPECT_NE(usage_message(0, 0, 1, 1, "cluster").find("launch has 0 rank"), std::string::npos);
}

TEST(Topology, degrees_below_one_are_refused) {
  EXPECT_NE(usage_message(0, 4, 0, 1, "cluster").find("partitions is 0"), std::string::npos);
  EXPECT_NE(usage_message(0, 4, 2, -1, "cluster").find("tensor_parallel_degree is -1"), std::string::npos);
}

TEST(Topology, degrees_whose_product_overflows_are_refused) {
  EXPECT_NE(usage_message(0, 4, 65536, 65536, "cluster").find("4294967296"), std::string::npos);
}

TEST(Topology, a_rank_outside_the_world_is_refused) {
  EXPECT_NE(usage_message(4, 4, 2, 1, "cluster").find("rank is 4"), std::string::npos);
  EXPECT_NE(usage_message(-1, 4, 2, 1, "cluster").find("rank is -1"), std::string::npos);
}

TEST(Topology, unknown_placements_are_refused) {
  for (const char* placement : {"", "dpt", "DP", "DPP", "DPTT", "Cluster"}) {
    EXPECT_NE(usage_message(0, 4, 2, 1, placement).find(std::string("'") + placement + "'"), std::string::npos);
  }
}

}  // namespace
}  // namespace smp
