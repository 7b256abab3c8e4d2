#!/usr/bin/env bash
# repeat_threads.sh COUNT: the thread tests of the engine so many times, in four processes side by side, so that threads get the
# cores in ever another order. (PipelineTsanAborts needs no repetition: it goes through all orders that it is about.)
set -euo pipefail
source "$(dirname "$0")/env.sh"

readonly kProcesses=4
each=$(((${1:?how often} + kProcesses - 1) / kProcesses))
logs="$(mktemp -d)"
processes=()
for ((i = 0; i < kProcesses; ++i)); do
  timeout 3600 "$SMP_BUILD/tests/cpp/smp_pipeline_test" --gtest_filter='PipelineTsanEngine.*' --gtest_repeat="$each" --gtest_shuffle --gtest_brief=1 \
    --gtest_throw_on_failure >"$logs/$i" 2>&1 &
  processes+=($!)
done
failed=0
for i in "${!processes[@]}"; do
  wait "${processes[$i]}" || { failed=1; tail -n 40 "$logs/$i"; }
done
passed="$(cat "$logs"/* | grep -c '^\[  PASSED  \]' || true)"
rm -r "$logs"
echo "$passed runs of $((each * kProcesses)) passed"
[[ $failed -eq 0 && $passed -eq $((each * kProcesses)) ]]
