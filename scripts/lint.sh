#!/usr/bin/env bash
# Format and static checks. clang-tidy looks only at C++ sources that differ from the merge base: one costs half a minute.
set -euo pipefail
source "$(dirname "$0")/env.sh"

say "clang-format"
cpp_sources -print0 | xargs -0 clang-format --dry-run -Werror

say "ruff"
ruff check .
ruff format --check .

say "mypy"
mypy

say "mutation patches"
for patch in tests/mutations/*.patch; do
  git apply --check "$patch" || { echo "$patch does not apply: make it anew for the code that it breaks" >&2; exit 1; }
done
echo "all apply"

# Sources changed since the branch left the main line, or not yet committed.
changed_sources() {
  local base
  base="$(git merge-base HEAD origin/main 2>/dev/null || git rev-parse --verify --quiet HEAD)" || return 0
  {
    git diff --name-only --diff-filter=d "$base" -- "${SMP_CPP_FOLDERS[@]}"
    git ls-files --others --exclude-standard -- "${SMP_CPP_FOLDERS[@]}"
  } | grep '\.cpp$' | sort -u || true
}

say "clang-tidy"
mapfile -t sources < <(changed_sources)
if [[ ${#sources[@]} -eq 0 ]]; then
  echo "no changed C++ sources"
else
  cmake --preset dev >/dev/null  # it wants each source compiled alone, which the build of the package does not do
  # On stderr it only counts the warnings in LibTorch's headers, which it suppressed.
  printf '%s\0' "${sources[@]}" |
    xargs -0 -n 1 -P "$CMAKE_BUILD_PARALLEL_LEVEL" clang-tidy --quiet -p build/dev 2> >(grep -v 'warnings generated' >&2)
  echo "${#sources[@]} sources checked"
fi
