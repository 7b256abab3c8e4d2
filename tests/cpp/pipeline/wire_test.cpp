#include "smp/pipeline/wire.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "smp/pipeline/instruction.h"

namespace smp::pipeline {
namespace {

Instruction round_trip(const Instruction& instruction) {
  Writer writer;
  instruction.encode(writer);
  Reader reader(writer.bytes());
  return Instruction::decode(reader);
}

TEST(Wire, fields_come_back_in_their_order) {
  Writer writer;
  writer(std::int32_t{-7}, std::string("a\0b", 3), true, 0.25, std::vector<std::string>{"", "x"},
         std::vector<std::int64_t>{});
  Reader reader(writer.bytes());
  EXPECT_EQ(reader.get<std::int32_t>(), -7);
  EXPECT_EQ(reader.get<std::string>(), std::string("a\0b", 3));
  EXPECT_TRUE(reader.get<bool>());
  EXPECT_EQ(reader.get<double>(), 0.25);
  EXPECT_EQ(reader.get<std::vector<std::string>>(), (std::vector<std::string>{"", "x"}));
  EXPECT_TRUE(reader.get<std::vector<std::int64_t>>().empty());
}

TEST(Wire, several_fields_may_be_read_at_once) {
  Writer writer;
  writer(std::uint8_t{3}, std::vector<std::vector<std::uint16_t>>{{1, 2}, {}, {3}});
  Reader reader(writer.bytes());
  std::uint8_t first = 0;
  std::vector<std::vector<std::uint16_t>> second;
  reader(first, second);
  EXPECT_EQ(first, 3);
  EXPECT_EQ(second, (std::vector<std::vector<std::uint16_t>>{{1, 2}, {}, {3}}));
}

TEST(Wire, bytes_that_end_too_early_are_refused_at_every_place) {
  Writer writer;
  writer(std::string("text"), std::vector<std::uint32_t>{1, 2}, std::uint8_t{1});
  for (std::size_t size = 0; size < writer.bytes().size(); ++size) {
    Reader reader(std::string_view(writer.bytes()).substr(0, size));
    EXPECT_THROW(
        {
          reader.get<std::string>();
          reader.get<std::vector<std::uint32_t>>();
          reader.get<std::uint8_t>();
        },
        FailureError)
        << size << " of " << writer.bytes().size() << " bytes";
  }
}

TEST(Wire, take_gives_the_bytes_away) {
  Writer writer;
  writer(std::uint8_t{65});
  EXPECT_EQ(writer.take(), "A");
}

TEST(WireOfInstruction, call_keeps_all_its_fields) {
  Call call;
  call.module = 3;
  call.call = 256;
  call.results = 512;
  call.tree = "tree";
  call.inputs = {1, 2};
  call.wants = {1, 0};
  call.modes = {false, true, false, c10::ScalarType::Half};
  call.training = std::string("\1\0", 2);
  call.ticket = 4;
  call.context = 6;
  call.report = true;
  call.expected = 99;
  call.mutated = {2};
  const auto read = round_trip({7, 1, 5, 9, true, {3, 4}, 77, call});
  EXPECT_EQ(read.frame, 7U);
  EXPECT_EQ(read.issuer, 1);
  EXPECT_EQ(read.microbatch, 5);
  EXPECT_EQ(read.step, 9U);
  EXPECT_TRUE(read.outermost);
  EXPECT_EQ(read.ancestors, (std::vector<FrameId>{3, 4}));
  EXPECT_EQ(read.key, 77U);
  const auto& body = std::get<Call>(read.body);
  EXPECT_EQ(body.module, 3);
  EXPECT_EQ(body.call, 256U);
  EXPECT_EQ(body.results, 512U);
  EXPECT_EQ(body.tree, "tree");
  EXPECT_EQ(body.inputs, call.inputs);
  EXPECT_EQ(body.wants, call.wants);
  EXPECT_FALSE(body.modes.grad);
  EXPECT_TRUE(body.modes.autocast);
  EXPECT_FALSE(body.modes.autocast_cache);
  EXPECT_EQ(body.modes.autocast_dtype, c10::ScalarType::Half);
  EXPECT_EQ(body.training, call.training);
  EXPECT_EQ(body.ticket, 4);
  EXPECT_EQ(body.context, 6U);
  EXPECT_TRUE(body.report);
  EXPECT_EQ(body.expected, 99U);
  EXPECT_EQ(body.mutated, call.mutated);
}

TEST(WireOfInstruction, every_kind_keeps_its_name_and_its_needs) {
  Call call;
  call.inputs = {1, 2};
  const std::vector<std::pair<Body, std::vector<ValueId>>> cases{
      {call, {1, 2}},
      {Op{"aten::add", "Tensor", "bytes", {3, 4}, {3}, {5, 0}, 6}, {3, 4}},
      {Backward{7, 1, {0, 8}, {9, 0}, 2, true}, {7, 8}},
      {Lift{1, 10, 11}, {}},
      {Accumulate{12, 13, 3, true}, {12, 13}},
      {Send{14, 1, 15}, {14}},
      {Alias{16, 17}, {16}},
      {End{}, {}},
      {Close{}, {}},
  };
  for (const auto& [body, needs] : cases) {
    const Instruction instruction{1, 0, 0, 1, false, {}, 0, body};
    const auto read = round_trip(instruction);
    EXPECT_STREQ(read.name(), instruction.name());
    EXPECT_EQ(read.needs(), needs) << read.name();
    Writer before;
    Writer after;
    instruction.encode(before);
    read.encode(after);
    EXPECT_EQ(before.bytes(), after.bytes()) << read.name();
  }
}

TEST(WireOfInstruction, only_calls_and_operators_change_values_in_place) {
  Call call;
  call.mutated = {4};
  EXPECT_EQ(*Instruction({1, 0, 0, 1, false, {}, 0, call}).mutated(), std::vector<ValueId>{4});
  EXPECT_EQ(*Instruction({1, 0, 0, 1, false, {}, 0, Op{"n", "o", "", {3}, {3}, {}, 0}}).mutated(),
            std::vector<ValueId>{3});
  EXPECT_EQ(Instruction({1, 0, 0, 1, false, {}, 0, Send{1, 1, 2}}).mutated(), nullptr);
}

TEST(WireOfInstruction, an_unknown_kind_is_refused) {
  Writer writer;
  Instruction{1, 0, 0, 1, false, {}, 0, Close{}}.encode(writer);
  auto bytes = writer.take();
  bytes.back() = 77;  // the kind: CLOSE has no fields after it
  Reader reader(bytes);
  EXPECT_THROW(Instruction::decode(reader), FailureError);
}

}  // namespace
}  // namespace smp::pipeline
