#pragma once

#include <mpi.h>

namespace smp::mpi {

/// Throws FailureError with MPI's own text unless `code` is MPI_SUCCESS; `call` names the function.
void check(int code, const char* call);

/// Initialises MPI if nobody did and counts one user of it. Collective if MPI is not initialised.
/// Throws UsageError if MPI was initialised with a level of thread support that does not allow ours.
void enter();

/// Counts one user less. The last one finalizes MPI if enter() initialised it and all users left cleanly: then
/// it is collective, over all processes.
void leave(bool clean);

/// True when more processes of this job run on this host than it lets them use cores. Collective over `comm`.
bool is_crowded(MPI_Comm comm);

}  // namespace smp::mpi
