#pragma once

#include <pthread.h>
#include <signal.h>
#include <smp/transport.h>

#include <memory>
#include <thread>
#include <utility>

namespace smp {

/// A thread that takes no signals: those are for the threads of the program.
template <typename Run>
std::thread start_without_signals(Run run) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(run));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

/// Destroys a transport in the process that made it. In a forked one its thread does not exist, its locks may be held
/// for ever and its connections belong to the parent: nothing can be torn down.
template <typename Kind>
std::shared_ptr<Transport> destroyed_in_owner(std::unique_ptr<Kind> transport) {
  return std::shared_ptr<Kind>(transport.release(), [](Kind* dying) {
    if (dying->in_owner_process()) {
      delete dying;
    }
  });
}

}  // namespace smp
