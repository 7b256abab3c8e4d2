#include "smp/pipeline/host.h"

#include "smp/error.h"

namespace smp::pipeline {

std::string Failure::describe() const {
  return formatted("rank {}, microbatch {}, {}: {}", rank, microbatch, where.empty() ? "in the step function" : where,
                   message);
}

void Host::describe(const std::exception_ptr& error, Failure& failure) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    failure.message = e.what();
  } catch (...) {
    failure.message = "an exception that is not a std::exception";
  }
}

void Host::throw_aborted(const Failure& failure) { throw FailureError(failure.describe()); }

}  // namespace smp::pipeline
