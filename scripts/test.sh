#!/usr/bin/env bash
# All tests: C++ (one ctest entry for each binary), then Python, after a check that none has been lost.
# Both run with what tests/environment.txt says, whatever the environment is here; SMP_TEST_THREADS=2 gives Python's tests two threads.
set -euo pipefail
source "$(dirname "$0")/env.sh"

say "Test names"
"$SMP_PYTHON" scripts/check_test_names.py --build "$SMP_BUILD"
say "C++ tests"
ctest --test-dir "$SMP_BUILD" --output-on-failure
say "Python tests"
"$SMP_PYTHON" -m pytest tests/python "$@"
