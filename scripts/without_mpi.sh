#!/usr/bin/env bash
# Builds the package as on a machine without MPI, and trains with it on two ranks that are connected by TCP.
set -euo pipefail
source "$(dirname "$0")/env.sh"

cmake --preset no-mpi
cmake --build --preset no-mpi
ctest --preset no-mpi -R '^smp_core_test$'

folder="$SMP_ROOT/build/no-mpi/site"
rm -rf "$folder"
cmake --install "$SMP_ROOT/build/no-mpi" --component python --prefix "$folder"
cp -r "$SMP_ROOT"/bindings/python/smp/. "$folder/smp"
[[ ! -e "$folder/smp/libsmp_mpi.so" ]] || die "the transport over MPI was built"

# Without site (-S) the editable install, which has MPI, is not found first.
site_packages="$("$SMP_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
run() { env PYTHONPATH="$folder:$site_packages" OMP_NUM_THREADS=1 "$@"; }
results="$(mktemp -d)"
for rank in 0 1; do
  run RANK=$rank WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29731 \
    "$SMP_PYTHON" -S "$SMP_ROOT/tests/python/core/launch_cases.py" "$results" &
done
wait -n && wait -n
[[ -s "$results/rank0.pt" && -s "$results/rank1.pt" ]] || die "the ranks saved nothing"
rm -r "$results"

message="$(run OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "$SMP_PYTHON" -S -c 'import smp; smp.init({"partitions": 2})' 2>&1)" &&
  die "ranks of mpirun were accepted"
[[ "$message" == *"torchrun or smp.launch, which need no MPI"* ]] || die "mpirun is refused without advice: $message"
say "Works without MPI"
