#!/usr/bin/env bash
# What is too slow for every change: sanitizers on the C++ tests, and repetitions of the tests whose order varies.
set -euo pipefail
source "$(dirname "$0")/env.sh"

say "AddressSanitizer: core and pipeline"
cmake --preset asan
cmake --build --preset asan
ctest --preset asan -R '^smp_(core|pipeline)_test$'

say "ThreadSanitizer: core, and the pipeline suites named for it"
cmake --preset tsan
cmake --build --preset tsan
export TSAN_OPTIONS="halt_on_error=1 suppressions=$SMP_ROOT/tests/cpp/tsan_suppressions.txt ${TSAN_OPTIONS:-}"
ctest --preset tsan -R '^smp_core_test$'
# A filter that matches nothing would pass.
build/tsan/tests/cpp/smp_pipeline_test --gtest_list_tests --gtest_filter='*Tsan*' | grep -q Tsan || die "no suite is named for ThreadSanitizer"
GTEST_FILTER='*Tsan*' ctest --preset tsan -R '^smp_pipeline_test$'

say "Threads: 500 times, four processes side by side"
scripts/repeat_threads.sh 500

say "Without MPI"
"$SMP_ROOT/scripts/without_mpi.sh"

say "Python tests, with more repetitions where order varies"
"$SMP_PYTHON" -m pytest tests/python --soak

say "Python tests, as on the CPU of another vendor than Intel"
"$SMP_ROOT/scripts/other_cpu.sh" "$SMP_PYTHON" -m pytest tests/python

say "Exactness, with the kernels of an old CPU, and with two threads for each rank"
exactness=(tests/python/pipeline/test_{exactness,modules,operators}.py tests/python/checkpointing/test_partitions.py tests/python/hugging_face/test_zoo.py)
ATEN_CPU_CAPABILITY=default "$SMP_PYTHON" -m pytest "${exactness[@]}"
SMP_TEST_THREADS=2 "$SMP_PYTHON" -m pytest "${exactness[@]}"

say "Sdist and wheel"
scripts/package.sh

say "The oldest and the newest PyTorch"
scripts/versions.sh 2.11.0 2.15.0
