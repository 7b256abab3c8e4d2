#include "socket.h"

#include <smp/error.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace smp::tcp {

void throw_errno(const char* call) { throw_failure("{}: {}", call, std::generic_category().message(errno)); }

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket::~Socket() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

}  // namespace smp::tcp
