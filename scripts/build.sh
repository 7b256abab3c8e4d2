#!/usr/bin/env bash
# Compiles the library, the extension and the C++ tests in one build folder and installs the package into .venv.
# The first time (and when the build description changes) pip does it; afterwards only what changed is compiled and copied.
set -euo pipefail
source "$(dirname "$0")/env.sh"

werror="${SMP_WARNINGS_AS_ERRORS:-OFF}"
site_packages="$("$SMP_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
stamp="$SMP_BUILD/.installed"

# pip's editable install maps the Python files it has seen, so a new file means a new install.
description() {
  printf '%s %s\n' "$site_packages" "$werror"
  cat pyproject.toml
  find bindings/python -name '*.py' | sort
}

wanted="$(description)"
if [[ -f "$stamp" && -d "$site_packages/smp" && "$(<"$stamp")" == "$wanted" ]]; then
  cmake --build "$SMP_BUILD" -- --quiet
  cmake --install "$SMP_BUILD" --component python --prefix "$site_packages" >/dev/null
else
  say "Compiling and installing the package (the first time takes several minutes)"
  "$SMP_PYTHON" -m pip install --quiet --no-build-isolation --no-deps --editable . \
    --config-settings=cmake.define.SMP_BUILD_TESTS=ON \
    --config-settings=cmake.define.SMP_WARNINGS_AS_ERRORS="$werror"
  printf '%s\n' "$wanted" >"$stamp"
fi
