// Text by fmt (the copy that LibTorch brings). Its engine is compiled once, in format.cpp: header-only it would be
// compiled again for every source that can throw a message, for longer than all the rest of most of them.
#pragma once

#include <fmt/base.h>

#include <string>
#include <string_view>

namespace smp {

std::string vformatted(fmt::string_view format, fmt::format_args arguments);

/// As fmt::format: `formatted("rank {}", 3)`. The format is checked when it is compiled.
template <typename... Args>
std::string formatted(fmt::format_string<Args...> format, const Args&... args) {
  return vformatted(format, fmt::make_format_args(args...));
}

/// The items as text, with `separator` between them.
template <typename Range>
std::string joined(const Range& items, std::string_view separator) {
  std::string text;
  bool first = true;
  for (const auto& item : items) {
    text += first ? std::string_view() : separator;
    text += formatted("{}", item);
    first = false;
  }
  return text;
}

}  // namespace smp
