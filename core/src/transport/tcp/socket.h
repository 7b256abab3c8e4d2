#pragma once

#include <utility>

namespace smp::tcp {

/// Throws FailureError with the text of `errno`; `call` names the function.
[[noreturn]] void throw_errno(const char* call);

/// An open file descriptor, or none (-1). Closed when destroyed, and never inherited by a program that this process
/// starts.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

}  // namespace smp::tcp
