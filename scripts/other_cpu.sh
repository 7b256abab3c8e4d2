#!/usr/bin/env bash
# Runs a command as on the CPU of another vendor than Intel (tests/other_cpu); without one, says where the library to preload is.
set -euo pipefail
source="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/tests/other_cpu/other_cpu.c"
library="${source%/tests/*}/build/other_cpu.so"

if [[ ! "$library" -nt "$source" ]]; then
  mkdir -p "${library%/*}"
  # Others may be compiling it, or running with it.
  "${CC:-cc}" -O1 -Wall -Wextra -Werror -shared -fPIC -o "$library.$$" "$source"
  mv "$library.$$" "$library"
fi
[[ $# -gt 0 ]] || { echo "$library"; exit; }
LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}" exec "$@"
