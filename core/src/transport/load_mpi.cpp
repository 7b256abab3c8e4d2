// Loads the transport over MPI, which lies in a library of its own beside this one.

#include <smp/transport.h>

#include <dlfcn.h>
#include <smp/error.h>

#include <filesystem>
#include <string>

#include "mpi/entry.h"

namespace smp {
namespace {

decltype(&smp_make_mpi_transport) load() {
  Dl_info own{};
  if (dladdr(reinterpret_cast<const void*>(&make_mpi_transport), &own) == 0) {
    throw_failure("the transport over MPI cannot be found: dladdr failed");
  }
  const std::string path = std::filesystem::path(own.dli_fname).replace_filename("libsmp_mpi.so").string();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw_failure(
        "the transport over MPI cannot be loaded: {}. Start the ranks with torchrun or smp.launch, which need no MPI, "
        "or "
        "install an MPI with its headers and build this library again",
        dlerror());
  }
  return reinterpret_cast<decltype(&smp_make_mpi_transport)>(dlsym(library, "smp_make_mpi_transport"));
}

}  // namespace

std::shared_ptr<Transport> make_mpi_transport() {
  static const auto make = load();  // tried again after it threw
  std::shared_ptr<Transport> transport;
  make(transport);
  return transport;
}

}  // namespace smp
