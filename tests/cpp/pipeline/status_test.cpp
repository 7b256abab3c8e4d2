#include "smp/pipeline/status.h"

#include <gtest/gtest.h>

#include <string>

namespace smp::pipeline {
namespace {

ValueId named(std::uint64_t counter, ValueId issuer = 0) { return (counter << kRankBits) | issuer; }

InstructionStatus waits(const std::string& what, std::vector<ValueId> missing, std::vector<ValueId> makes) {
  InstructionStatus status{what, 2, 7.5, false, true, std::move(missing), std::move(makes), {}};
  status.counts.assign(status.makes.size(), 1);
  return status;
}

InstructionStatus runs(const std::string& what, ValueId makes, std::uint64_t count) {
  return {what, 2, 9.0, true, false, {}, {makes}, {count}};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(ExplainStall, follows_the_chain_over_ranks_to_what_runs) {
  RankStatus first, second;
  first.instructions = {waits("BACKWARD of module 'a'", {named(5)}, {named(9)})};
  second.instructions = {runs("CALL of module 'b'", named(30), 4), waits("SEND", {named(32)}, {named(5)})};
  const auto text = explain_stall({10, 11}, {first, second});
  EXPECT_TRUE(contains(text,
                       "BACKWARD of module 'a', microbatch 2 on rank 10 waits for SEND, microbatch 2 on rank 11 "
                       "waits for CALL of module 'b', microbatch 2 on rank 11, which runs"))
      << text;
  EXPECT_TRUE(contains(text, "CALL of module 'b', microbatch 2 runs for 9.0 s")) << text;
  EXPECT_TRUE(contains(text, "waits for 7.5 s for value 0.5 of SEND, microbatch 2 on rank 11")) << text;
}

TEST(ExplainStall, names_ranks_that_do_not_answer_and_values_that_nobody_makes) {
  RankStatus first;
  first.instructions = {waits("SEND", {named(5)}, {})};
  const auto text = explain_stall({0, 1}, {first, std::nullopt});
  EXPECT_TRUE(contains(text, "rank 1 does not answer")) << text;
  EXPECT_TRUE(contains(text, "value 0.5 that no rank which answers is about to make")) << text;
}

TEST(ExplainStall, tells_names_of_different_issuers_apart_and_takes_the_nearest_run) {
  RankStatus first;
  first.instructions = {waits("OP aten::add", {named(8, 1)}, {}), runs("other issuer", named(8, 0), 1),
                        runs("far run", named(1, 1), 100), runs("near run", named(7, 1), 2)};
  EXPECT_TRUE(contains(explain_stall({0}, {first}), "waits for near run, microbatch 2 on rank 0, which runs"));
}

TEST(ExplainStall, a_ring_of_waits_ends) {
  RankStatus first;
  first.instructions = {waits("x", {named(1)}, {named(2)}), waits("y", {named(2)}, {named(1)})};
  EXPECT_TRUE(contains(explain_stall({0}, {first}), "waits for ..."));
}

}  // namespace
}  // namespace smp::pipeline
