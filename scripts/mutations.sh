#!/usr/bin/env bash
# Breaks the library on purpose and sees its tests fail; arguments are names of patches in tests/mutations, all without.
set -euo pipefail
source "$(dirname "$0")/env.sh"

"$SMP_PYTHON" tests/mutations/run.py "$@"
