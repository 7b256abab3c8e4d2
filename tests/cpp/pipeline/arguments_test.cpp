#include "smp/pipeline/arguments.h"

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace smp::pipeline {
namespace {

/// Writes and reads one argument; tensors travel inline, undefined ones as a mark.
c10::IValue travel(const c10::IValue& argument) {
  Writer writer;
  write_argument(argument, writer, [](const at::Tensor& x, Writer& bytes) {
    bytes(x.defined());
    if (x.defined()) {
      write_inline(x, bytes);
    }
  });
  Reader reader(writer.bytes());
  return read_argument(reader, [](Reader& bytes) { return bytes.get<bool>() ? read_inline(bytes) : at::Tensor(); });
}

TEST(Arguments, plain_values_travel) {
  EXPECT_TRUE(travel({}).isNone());
  EXPECT_EQ(travel(std::int64_t{-5}).toInt(), -5);
  EXPECT_EQ(travel(0.1).toDouble(), 0.1);
  EXPECT_TRUE(travel(true).isBool());
  EXPECT_TRUE(travel(true).toBool());
  EXPECT_EQ(travel(std::string("mean")).toStringRef(), "mean");
  EXPECT_EQ(travel(c10::complex<double>(1, -2)).toComplexDouble(), c10::complex<double>(1, -2));
  EXPECT_EQ(travel(c10::Device("cpu")).toDevice(), c10::Device("cpu"));
}

TEST(Arguments, integers_and_doubles_stay_apart) {
  EXPECT_TRUE(travel(std::int64_t{1}).isInt());
  EXPECT_TRUE(travel(1.0).isDouble());
}

TEST(Arguments, symbolic_sizes_travel_as_integers) {
  EXPECT_EQ(travel(c10::SymInt(7)).toInt(), 7);
  EXPECT_EQ(travel(std::vector<c10::SymInt>{2, 3}).toIntVector(), (std::vector<std::int64_t>{2, 3}));
}

TEST(Arguments, lists_travel) {
  EXPECT_EQ(travel(std::vector<std::int64_t>{1, -2}).toIntVector(), (std::vector<std::int64_t>{1, -2}));
  EXPECT_EQ(travel(std::vector<double>{0.5}).toDoubleVector(), std::vector<double>{0.5});
  const auto flags = travel(c10::List<bool>({true, false})).toBoolList();
  EXPECT_EQ(flags.size(), 2U);
  EXPECT_TRUE(flags.get(0));
  EXPECT_FALSE(flags.get(1));
  EXPECT_TRUE(travel(std::vector<std::int64_t>{}).toIntVector().empty());
}

TEST(Arguments, tensors_travel_alone_and_in_lists) {
  const auto x = at::arange(6).view({2, 3});
  EXPECT_TRUE(at::equal(travel(x).toTensor(), x));
  EXPECT_FALSE(travel(at::Tensor()).toTensor().defined());
  const auto list = travel(std::vector<at::Tensor>{x, at::Tensor(), x.t()}).toTensorVector();
  ASSERT_EQ(list.size(), 3U);
  EXPECT_TRUE(at::equal(list[0], x));
  EXPECT_FALSE(list[1].defined());
  EXPECT_TRUE(at::equal(list[2], x.t()));
}

TEST(Arguments, optional_tensors_travel) {
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(std::nullopt);
  list.push_back(at::ones({2}));
  const auto read = travel(list).toOptionalTensorList();
  ASSERT_EQ(read.size(), 2U);
  EXPECT_FALSE(read.get(0).has_value());
  EXPECT_TRUE(at::equal(*read.get(1), at::ones({2})));
}

TEST(Arguments, a_generator_can_not_travel) {
  try {
    travel(at::make_generator<at::CPUGeneratorImpl>());
    FAIL() << "a generator travelled";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("Generator"), std::string::npos) << error.what();
  }
}

TEST(Arguments, an_unknown_kind_is_refused) {
  const std::string bytes(1, '\x77');
  Reader reader(bytes);
  EXPECT_THROW(read_argument(reader, [](Reader&) { return at::Tensor(); }), FailureError);
}

TEST(Arguments, replace_tensors_reaches_every_tensor) {
  const auto twice = [](const at::Tensor& x) { return x * 2; };
  c10::IValue one(at::ones({}));
  c10::IValue several(std::vector<at::Tensor>{at::ones({}), at::Tensor()});
  c10::List<std::optional<at::Tensor>> optionals;
  optionals.push_back(std::nullopt);
  optionals.push_back(at::ones({}));
  c10::IValue optional(optionals);
  c10::IValue number(std::int64_t{1});
  for (auto* argument : {&one, &several, &optional, &number}) {
    replace_tensors(*argument, twice);
  }
  EXPECT_EQ(one.toTensor().item<float>(), 2);
  EXPECT_EQ(several.toTensorVector()[0].item<float>(), 2);
  EXPECT_FALSE(several.toTensorVector()[1].defined());
  EXPECT_FALSE(optional.toOptionalTensorList().get(0).has_value());
  EXPECT_EQ(optional.toOptionalTensorList().get(1)->item<float>(), 2);
  EXPECT_EQ(number.toInt(), 1);
}

TEST(Arguments, an_inline_tensor_keeps_dtype_and_being_a_number) {
  auto number = at::scalar_tensor(2.5, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  const auto read = travel(number).toTensor();
  EXPECT_TRUE(read.unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_EQ((at::ones({1}, at::kHalf) * read).scalar_type(), at::kHalf);
  EXPECT_FALSE(travel(at::scalar_tensor(2.5)).toTensor().unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_EQ(travel(at::ones({2}, at::kBFloat16)).toTensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(travel(at::ones({0, 2}, at::kBool)).toTensor().sizes(), (std::vector<std::int64_t>{0, 2}));
}

TEST(Arguments, an_inline_tensor_does_not_carry_its_graph) {
  const auto x = at::ones({2}).set_requires_grad(true);
  EXPECT_FALSE(travel(x).toTensor().requires_grad());
}

}  // namespace
}  // namespace smp::pipeline
