#!/usr/bin/env bash
# versions.sh [TORCH[:PYTHON]...]: builds the package as `pip install` does beside each supported PyTorch (2.12.1, or 2.12.1:python3.12
# for another interpreter than that of .venv), runs a quick set of tests with it, and prints a matrix. All of them without arguments.
# Those that can't be installed here are only reported, unless that is all of them. Takes 6 GB of disk for each, in build/versions.
set -euo pipefail
source "$(dirname "$0")/env.sh"

kVersions=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
kTests=(tests/python/pipeline/test_exactness.py tests/python/pipeline/test_modules.py tests/python/pipeline/test_patches.py
  tests/python/checkpointing/test_field_bugs.py tests/python/test_environment.py)
kOneModel='llama and not 5.17.0'  # that transformers lies beside another environment

asked=("$@")
if [[ $# -eq 0 ]]; then
  asked=("${kVersions[@]}")
  for python in python3.13 python3.12; do  # the newest but one PyTorch once more
    if "$python" -c '' 2>/dev/null; then
      asked+=("${kVersions[-2]}:$python")
      break
    fi
  done
fi

rows=()
tried=0
failed=0
report() { rows+=("$(printf '%-9s %-8s %-6s %s' "$@")"); }

for one in "${asked[@]}"; do
  version="${one%%:*}"
  host_python="$SMP_PYTHON"
  [[ "$one" != *:* ]] || host_python="${one#*:}"
  short="$("$host_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || die "$host_python does not run"
  folder="$SMP_ROOT/build/versions/$version-$short"
  python="$folder/venv/bin/python"
  log="$folder/log"
  mkdir -p "$folder"
  say "PyTorch $version, Python $short ($folder/log)"

  if ! {
    [[ -x "$python" ]] || "$("$host_python" -c 'import sys; print(sys._base_executable)')" -m venv "$folder/venv"
    "$python" -m pip install "torch==$version" &&
      # What the tests need, of the versions that they are written for, less torch itself.
      grep -hvE '^(torch==|-r |#)' requirements/{runtime,build,demo,test}.txt >"$folder/requirements.txt" &&
      "$python" -m pip install -r "$folder/requirements.txt"
  } >"$log" 2>&1; then
    echo "can't be installed here: $(grep -m1 -E '^ERROR' "$log" || tail -n 1 "$log")"
    report "$version" "$short" - "can't be installed here"
    continue
  fi
  tried=$((tried + 1))
  built_for="$("$python" -c 'import torch; print("CUDA" if torch.version.cuda else "CPU")')"

  if ! "$python" -m pip install --no-build-isolation --no-deps --force-reinstall . --config-settings=build-dir="$folder/build" >>"$log" 2>&1; then
    tail -n 20 "$log"
    report "$version" "$short" "$built_for" "does not build"
    failed=1
    continue
  fi
  result=0
  {
    "$python" -m pytest "${kTests[@]}" -q &&
      "$python" -m pytest tests/python/hugging_face/test_zoo.py -q -k "$kOneModel"
  } >>"$log" 2>&1 || result=$?
  summary="$(grep -E '^(=+ )?[0-9]+ (passed|failed|errors?)\b.* in ' "$log" | tr -d '=' | tr '\n' ';' || true)"
  summary="${summary:-no result, status $result}"
  echo "$summary"
  if [[ $result -ne 0 ]]; then
    grep -E '^(FAILED|ERROR)' "$log" | head -20 || tail -n 20 "$log"
    failed=1
  fi
  report "$version" "$short" "$built_for" "$summary"
done

say "Matrix"
printf '%-9s %-8s %-6s %s\n' PyTorch Python build tests
printf '%s\n' "${rows[@]}"
[[ $failed -eq 0 && $tried -gt 0 ]]
