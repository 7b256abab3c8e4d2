#!/usr/bin/env bash
# Makes an sdist, a wheel from that, and uses the wheel in a fresh environment: import, and two ranks that torchrun starts.
set -euo pipefail
source "$(dirname "$0")/env.sh"

folder="$SMP_ROOT/build/package"
rm -rf "$folder"
mkdir -p "$folder/sdist" "$folder/wheel" "$folder/results"

say "Sdist"
"$SMP_PYTHON" -c "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))" "$folder/sdist"
say "Wheel, from the sdist"
"$SMP_PYTHON" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$folder/wheel" "$folder"/sdist/*.tar.gz
ls "$folder/wheel"

say "A fresh environment"
"$("$SMP_PYTHON" -c 'import sys; print(sys._base_executable)')" -m venv "$folder/venv"
python="$folder/venv/bin/python"
torch="$("$SMP_PYTHON" -c 'import torch; print(torch.__version__.split("+")[0])')"
"$python" -m pip install --quiet "torch==$torch" "$folder"/wheel/*.whl
# In the checkout: its folders must not hide the package.
"$python" -c "import smp; print(smp.__file__)" | grep -F "$folder/venv" || die "another smp than the wheel's was imported"
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 tests/python/core/launch_cases.py "$folder/results"
[[ -s "$folder/results/rank0.pt" && -s "$folder/results/rank1.pt" ]] || die "the ranks saved nothing"
say "Sdist and wheel work"
