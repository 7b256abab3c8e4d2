#include "smp/error.h"

namespace smp {

Error::Error(const std::string& message) : std::runtime_error(message) {}
UsageError::UsageError(const std::string& message) : Error(message) {}
FailureError::FailureError(const std::string& message) : Error(message) {}

// Defined here, not inline: one home for the type information, so that a catch works across shared libraries.
Error::~Error() = default;
UsageError::~UsageError() = default;
FailureError::~FailureError() = default;

}  // namespace smp
