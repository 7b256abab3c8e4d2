#include <smp/error.h>
#include <smp/transport.h>

namespace smp {

std::shared_ptr<Transport> make_mpi_transport() {
  throw_failure("this library was built without MPI: build it with SMP_WITH_MPI=ON where an MPI is installed");
}

}  // namespace smp
