#!/usr/bin/env bash
# Trains the sample on two ranks; further arguments go to the sample.
set -euo pipefail
source "$(dirname "$0")/env.sh"

exec mpirun -np 2 "$SMP_PYTHON" samples/gpt2_text/train.py "$@"
