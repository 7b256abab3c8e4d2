#!/usr/bin/env bash
# build.sh compile|install [demo|test|lint]: compiles what changed of the library, the extension and (but for demo) the C++ tests, in
# one build folder; or installs what was compiled into .venv.
set -euo pipefail
source "$(dirname "$0")/env.sh"

readonly kPart="${1:-}"
readonly kPurpose="${2:-test}"
werror="${SMP_WARNINGS_AS_ERRORS:-OFF}"
site_packages="$("$SMP_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"

# Once with tests, always with tests: what is built stays built.
tests=ON
if [[ "$kPurpose" == demo ]] && ! grep -qs -e '-DSMP_BUILD_TESTS=ON' "$SMP_BUILD/.configured"; then
  tests=OFF
fi
definitions=(-DSMP_BUILD_TESTS="$tests" -DSMP_WARNINGS_AS_ERRORS="$werror" -DPython_EXECUTABLE="$SMP_PYTHON"
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_UNITY_BUILD=ON)

# A stamp says for what CMake was run, and what pip's editable install knows: it maps the Python files it has seen.
configured() { printf '%s\n' "${definitions[@]}" "$site_packages"/torch-*.dist-info; cat pyproject.toml; }
installed() { configured; find bindings/python -name '*.py' | sort; }
is_new() { [[ ! -f "$1" || "$(<"$1")" != "$($2)" ]]; }

compile() {
  if is_new "$SMP_BUILD/.configured" configured; then
    say "Compiling the package (the first time takes minutes)"
    cmake -S . -B "$SMP_BUILD" -G Ninja "${definitions[@]}" >/dev/null
    configured >"$SMP_BUILD/.configured"
  fi
  NINJA_STATUS='[%f of %t, %e s] ' cmake --build "$SMP_BUILD" | { grep --line-buffered -vE 'Re-checking globbed|no work to do' || true; }
}

install() {
  if [[ -d "$site_packages/smp" ]] && ! is_new "$SMP_BUILD/.installed" installed; then
    cmake --install "$SMP_BUILD" --component python --prefix "$site_packages" >/dev/null
    return
  fi
  say "Installing the package into .venv"
  local options=() definition
  for definition in "${definitions[@]}"; do
    options+=(--config-settings=cmake.define."${definition#-D}")
  done
  "$SMP_PYTHON" -m pip install --quiet --no-build-isolation --no-deps --editable . "${options[@]}"
  installed >"$SMP_BUILD/.installed"
}

case "$kPart" in
  compile | install) "$kPart" ;;
  *) die "build.sh got '$kPart': compile or install" ;;
esac
