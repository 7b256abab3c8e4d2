#pragma once

#include <stdexcept>
#include <string>

#include "smp/format.h"

namespace smp {

/// Base of all errors that this library throws.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  ~Error() override;
};

/// The caller broke a rule and can mend it. The message gives the value, the rule and the remedy.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message);
  ~UsageError() override;
};

/// What can happen at run time without anybody's mistake here: a peer has gone, a transport was closed.
class FailureError : public Error {
 public:
  explicit FailureError(const std::string& message);
  ~FailureError() override;
};

/// Throws UsageError with a formatted message: `throw_usage("microbatches is {}: at least 1 is needed", count)`.
template <typename... Args>
[[noreturn]] void throw_usage(fmt::format_string<Args...> format, const Args&... args) {
  throw UsageError(formatted(format, args...));
}

/// Throws FailureError with a formatted message: `throw_failure("rank {} has closed its transport", rank)`.
template <typename... Args>
[[noreturn]] void throw_failure(fmt::format_string<Args...> format, const Args&... args) {
  throw FailureError(formatted(format, args...));
}

}  // namespace smp
