#include "smp/pipeline/tensor_meta.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "smp/error.h"

namespace smp::pipeline {
namespace {

/// The tensor after its bytes and its description travelled.
at::Tensor travel(const at::Tensor& x) { return unpack(pack(x), travelled(TensorMeta::of(x))); }

struct Case {
  std::string what;
  at::Tensor tensor;
  std::int64_t packed_bytes;
  bool keeps_strides;
};

std::vector<Case> cases() {
  const auto x = at::arange(24, at::kFloat).view({4, 6});
  return {
      {"dense", x, 96, true},
      {"transposed", x.t(), 96, true},
      {"permuted", at::arange(24, at::kFloat).view({2, 3, 4}).permute({2, 0, 1}), 96, true},
      {"channels last", at::arange(48, at::kFloat).view({2, 3, 2, 4}).contiguous(at::MemoryFormat::ChannelsLast), 192,
       true},
      {"expanded", at::arange(6, at::kFloat).expand({4, 6}), 24, true},
      {"expanded in the middle", at::arange(6, at::kFloat).view({2, 1, 3}).expand({2, 5, 3}), 24, true},
      {"a scalar expanded", at::full({1}, 3.0).expand({7, 9}), 4, true},
      {"rows of it", x.slice(0, 1, 3), 48, true},
      {"columns of it", x.slice(1, 1, 3), 32, false},
      {"every second column", x.slice(1, 0, 6, 2), 48, false},
      {"windows that overlap", at::arange(6, at::kFloat).unfold(0, 3, 1), 24, true},
      {"one number", at::full({}, 5.0), 4, true},
      {"one element with odd strides", x.as_strided({1, 1}, {17, 5}), 4, true},
      {"empty", at::empty({0}), 0, true},
      {"empty with sizes", at::empty({3, 0, 2}), 0, true},
      {"bool", x > 11, 24, true},
      {"uint8", x.to(at::kByte), 24, true},
      {"int64", x.to(at::kLong), 192, true},
      {"bfloat16", x.to(at::kBFloat16), 48, true},
      {"half columns", x.to(at::kHalf).slice(1, 0, 2), 16, false},
      {"double", x.to(at::kDouble).t(), 192, true},
      {"complex", at::complex(x, x + 1), 192, true},
  };
}

TEST(TensorMeta, tensors_of_every_layout_and_dtype_travel) {
  for (const auto& [what, tensor, packed_bytes, keeps_strides] : cases()) {
    SCOPED_TRACE(what);
    const auto copy = travel(tensor);
    EXPECT_EQ(pack(tensor).numel(), packed_bytes);
    EXPECT_EQ(copy.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(copy.sizes(), tensor.sizes());
    EXPECT_TRUE(at::equal(copy, tensor));
    if (keeps_strides) {
      EXPECT_EQ(copy.strides(), tensor.strides());
    } else {
      EXPECT_TRUE(copy.is_contiguous());
    }
  }
}

TEST(TensorMeta, a_packed_tensor_shares_nothing_with_its_source) {
  for (const auto& test : cases()) {
    if (test.tensor.numel() > 0 && test.tensor.scalar_type() == at::kFloat) {
      auto source = test.tensor.clone(at::MemoryFormat::Preserve);
      const auto before = source.clone();
      const auto copy = travel(source);
      source.fill_(-1);
      EXPECT_TRUE(at::equal(copy, before)) << test.what;
    }
  }
}

TEST(TensorMeta, an_unpacked_tensor_takes_over_the_bytes) {
  const auto bytes = pack(at::ones({3}));
  const auto copy = unpack(bytes, TensorMeta::of(at::ones({3})));
  EXPECT_EQ(copy.const_data_ptr(), bytes.const_data_ptr());
}

TEST(TensorMeta, conjugate_and_negative_views_travel_as_their_values) {
  const auto x = at::complex(at::arange(6, at::kFloat), at::ones({6}));
  EXPECT_TRUE(at::equal(travel(x.conj()), x.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(travel(at::imag(x.conj())), at::full({6}, -1.0)));
}

TEST(TensorMeta, sparse_tensors_are_refused_with_advice) {
  try {
    static_cast<void>(TensorMeta::of(at::eye(3).to_sparse()));
    FAIL() << "a sparse tensor was taken";
  } catch (const UsageError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("[3, 3]"), std::string::npos) << message;
    EXPECT_NE(message.find(".to_dense()"), std::string::npos) << message;
  }
}

TEST(TensorMeta, describes_the_tensor) {
  const auto x = at::zeros({2, 3}, at::kHalf).t().set_requires_grad(true);
  const auto meta = TensorMeta::of(x);
  EXPECT_EQ(meta.sizes, (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(meta.strides, (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(meta.dtype, at::kHalf);
  EXPECT_TRUE(meta.requires_grad);
  EXPECT_EQ(meta.bytes(), 12);
  EXPECT_EQ(TensorMeta::of(at::ones({1}).expand({8})).bytes(), 32);
}

TEST(TensorMeta, comes_back_from_its_bytes) {
  auto meta = TensorMeta::of(at::zeros({2, 3}, at::kBFloat16).set_requires_grad(true));
  Writer writer;
  meta.fields(writer);
  Reader reader(writer.bytes());
  TensorMeta read;
  read.fields(reader);
  EXPECT_EQ(read.sizes, meta.sizes);
  EXPECT_EQ(read.strides, meta.strides);
  EXPECT_EQ(read.dtype, meta.dtype);
  EXPECT_TRUE(read.requires_grad);
}

TEST(TensorMeta, a_sliced_tensor_travels_contiguous_and_keeps_the_rest) {
  auto x = at::zeros({4, 6}).slice(1, 0, 2);
  auto meta = TensorMeta::of(x);
  meta.requires_grad = true;
  const auto after = travelled(meta);
  EXPECT_EQ(after.strides, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(after.sizes, meta.sizes);
  EXPECT_TRUE(after.requires_grad);
}

}  // namespace
}  // namespace smp::pipeline
