// The bytes of engine messages: little archives that write and read the same list of fields.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "smp/error.h"

namespace smp::pipeline {

/// Appends fields to a byte string. Ranks of one launch share a byte order, so values go as they lie in memory.
class Writer {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (write(fields), ...);
  }

  [[nodiscard]] const std::string& bytes() const { return bytes_; }
  std::string take() { return std::move(bytes_); }

 private:
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void write(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void write(const std::string& text) {
    write(static_cast<std::uint64_t>(text.size()));
    bytes_.append(text);
  }
  template <typename T>
  void write(const std::vector<T>& items) {
    write(static_cast<std::uint64_t>(items.size()));
    for (const auto& item : items) {
      write(item);
    }
  }

  std::string bytes_;
};

/// Reads the fields that a Writer wrote, in the same order. Throws FailureError when the bytes end too early.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename... Fields>
  void operator()(Fields&... fields) {
    (read(fields), ...);
  }

  template <typename T>
  T get() {
    T value{};
    read(value);
    return value;
  }

 private:
  std::string_view cut(std::size_t size) {
    if (size > rest_.size()) {
      throw_failure("a message between ranks ended {} bytes too early: do all ranks run the same version of smp?",
                    size - rest_.size());
    }
    auto head = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return head;
  }
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void read(T& value) {
    std::memcpy(&value, cut(sizeof(T)).data(), sizeof(T));
  }
  void read(std::string& text) { text = std::string(cut(get<std::uint64_t>())); }
  template <typename T>
  void read(std::vector<T>& items) {
    items.resize(get<std::uint64_t>());
    for (auto& item : items) {
      read(item);
    }
  }

  std::string_view rest_;
};

}  // namespace smp::pipeline
