#include "smp/pipeline/arguments.h"

#include <ATen/core/List.h>

#include "smp/pipeline/tensor_meta.h"

namespace smp::pipeline {
namespace {

enum class Tag : std::uint8_t {
  kNone,
  kTensor,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kDevice,
  kInts,
  kDoubles,
  kBools,
  kTensors,
  kOptionalTensors
};

std::vector<std::uint8_t> as_bytes(const c10::List<bool>& list) {
  std::vector<std::uint8_t> bytes;
  for (bool item : list) {
    bytes.push_back(item ? 1 : 0);
  }
  return bytes;
}

}  // namespace

void write_argument(const c10::IValue& argument, Writer& writer, const TensorWriter& tensor) {
  if (argument.isNone()) {
    writer(Tag::kNone);
  } else if (argument.isTensor()) {
    writer(Tag::kTensor);
    tensor(argument.toTensor(), writer);
  } else if (argument.isInt() || argument.isSymInt()) {
    writer(Tag::kInt, argument.isInt() ? argument.toInt() : argument.toSymInt().guard_int(__FILE__, __LINE__));
  } else if (argument.isDouble() || argument.isSymFloat()) {
    writer(Tag::kDouble, argument.toDouble());
  } else if (argument.isBool() || argument.isSymBool()) {
    writer(Tag::kBool, argument.toBool());
  } else if (argument.isComplexDouble()) {
    writer(Tag::kComplex, argument.toComplexDouble().real(), argument.toComplexDouble().imag());
  } else if (argument.isString()) {
    writer(Tag::kString, argument.toStringRef());
  } else if (argument.isDevice()) {
    writer(Tag::kDevice, argument.toDevice().str());
  } else if (argument.isIntList()) {
    writer(Tag::kInts, argument.toIntVector());
  } else if (argument.isSymIntList()) {
    std::vector<std::int64_t> sizes;
    for (const auto& size : argument.toSymIntVector()) {
      sizes.push_back(size.guard_int(__FILE__, __LINE__));
    }
    writer(Tag::kInts, sizes);
  } else if (argument.isDoubleList()) {
    writer(Tag::kDoubles, argument.toDoubleVector());
  } else if (argument.isBoolList()) {
    writer(Tag::kBools, as_bytes(argument.toBoolList()));
  } else if (argument.isTensorList()) {
    const auto list = argument.toTensorVector();
    writer(Tag::kTensors, static_cast<std::uint64_t>(list.size()));
    for (const auto& item : list) {
      tensor(item, writer);
    }
  } else if (argument.isOptionalTensorList()) {
    const auto list = argument.toOptionalTensorList().vec();
    writer(Tag::kOptionalTensors, static_cast<std::uint64_t>(list.size()));
    for (const auto& item : list) {
      writer(item.has_value());
      if (item) {
        tensor(*item, writer);
      }
    }
  } else if (argument.isList() && argument.toListRef().empty()) {
    writer(Tag::kInts, std::vector<std::int64_t>{});
  } else {
    throw_usage(
        "an operator on a tensor of another partition has an argument of type {}, which can't travel between ranks: "
        "call it in a module",
        argument.tagKind());
  }
}

c10::IValue read_argument(Reader& reader, const TensorReader& tensor) {
  switch (reader.get<Tag>()) {
    case Tag::kNone:
      return {};
    case Tag::kTensor:
      return tensor(reader);
    case Tag::kInt:
      return reader.get<std::int64_t>();
    case Tag::kDouble:
      return reader.get<double>();
    case Tag::kBool:
      return reader.get<bool>();
    case Tag::kComplex: {
      const auto real = reader.get<double>();
      return c10::complex<double>(real, reader.get<double>());
    }
    case Tag::kString:
      return reader.get<std::string>();
    case Tag::kDevice:
      return c10::Device(reader.get<std::string>());
    case Tag::kInts:
      return reader.get<std::vector<std::int64_t>>();
    case Tag::kDoubles:
      return reader.get<std::vector<double>>();
    case Tag::kBools: {
      c10::List<bool> list;
      for (auto item : reader.get<std::vector<std::uint8_t>>()) {
        list.push_back(item != 0);
      }
      return list;
    }
    case Tag::kTensors: {
      c10::List<at::Tensor> list;
      for (auto left = reader.get<std::uint64_t>(); left > 0; --left) {
        list.push_back(tensor(reader));
      }
      return list;
    }
    case Tag::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      for (auto left = reader.get<std::uint64_t>(); left > 0; --left) {
        list.push_back(reader.get<bool>() ? std::optional(tensor(reader)) : std::nullopt);
      }
      return list;
    }
  }
  throw_failure("a message holds an argument of a kind that this version of smp does not know");
}

void replace_tensors(c10::IValue& argument, const std::function<at::Tensor(const at::Tensor&)>& visit) {
  if (argument.isTensor()) {
    if (argument.toTensor().defined()) {
      argument = visit(argument.toTensor());
    }
  } else if (argument.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : argument.toTensorVector()) {
      list.push_back(item.defined() ? visit(item) : item);
    }
    argument = std::move(list);
  } else if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : argument.toOptionalTensorList().vec()) {
      list.push_back(item && item->defined() ? std::optional(visit(*item)) : item);
    }
    argument = std::move(list);
  }
}

void write_inline(const at::Tensor& tensor, Writer& writer) {
  auto meta = travelled(TensorMeta::of(tensor));
  meta.fields(writer);
  const auto bytes = pack(tensor.detach());
  writer(tensor.unsafeGetTensorImpl()->is_wrapped_number(),
         std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel()));
}

at::Tensor read_inline(Reader& reader) {
  TensorMeta meta;
  meta.fields(reader);
  const bool wrapped = reader.get<bool>();
  const auto bytes = reader.get<std::string>();
  TensorMeta flat{{static_cast<std::int64_t>(bytes.size())}, {1}, c10::ScalarType::Byte, false};
  auto buffer = unpack({}, flat);
  std::memcpy(buffer.mutable_data_ptr(), bytes.data(), bytes.size());
  auto tensor = unpack(buffer, meta);
  if (wrapped) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

}  // namespace smp::pipeline
