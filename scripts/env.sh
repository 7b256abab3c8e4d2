# Sourced by every script: paths and the environment in which builds, tests and samples run.

SMP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$SMP_ROOT"

SMP_VENV="$SMP_ROOT/.venv"
SMP_PYTHON="$SMP_VENV/bin/python"
SMP_BUILD="$SMP_ROOT/build/editable"
export PATH="$SMP_VENV/bin:$PATH"

# Heavy LibTorch units need about 2 GB each, so no more of them at once than there are cores.
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"

# Ranks share the cores of one machine here: a thread pool in each would only make them wait for one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Open MPI: allow root (containers) and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

SMP_CPP_FOLDERS=(core partition checkpointing pipeline bindings tests/cpp benchmarks)
# All C++ sources and headers, as find prints them: further arguments go to find.
cpp_sources() { find "${SMP_CPP_FOLDERS[@]}" \( -name '*.cpp' -o -name '*.h' \) "$@"; }
