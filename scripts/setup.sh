#!/usr/bin/env bash
# Makes a clean clone ready: system packages, .venv, the package and the C++ tests. Safe to repeat; does only what is missing.
set -euo pipefail
source "$(dirname "$0")/env.sh"

readonly kPackages=(g++ cmake ninja-build ccache openmpi-bin libopenmpi-dev libgtest-dev clang-format clang-tidy)
host_python="${PYTHON:-python3}"

install_packages() {
  [[ $(id -u) -eq 0 ]] || die "missing system packages: $*. Install them with: sudo apt-get install $*"
  say "Installing system packages: $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@" </dev/null
}

system_packages_debian() {
  local missing=() package
  for package in "${kPackages[@]}"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
  done
  # Only Debian's own interpreter gets its headers and venv from packages; others (pyenv, conda) bring them.
  if [[ "$(command -v "$host_python" || true)" =~ ^(/usr)?/bin/python3$|^$ ]]; then
    for package in python3-dev python3-venv; do
      [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
    done
  fi
  [[ ${#missing[@]} -eq 0 ]] || install_packages "${missing[@]}"
}

system_packages_elsewhere() {
  local missing=() tool
  for tool in g++ cmake ccache mpirun clang-format clang-tidy "$host_python"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [[ ${#missing[@]} -eq 0 ]] || die "not found: ${missing[*]}. Install a C++20 compiler (GCC 12 or newer), CMake 3.25 or newer, \
ccache, Open MPI with headers, GoogleTest, clang-format, clang-tidy and Python 3.11 or newer with headers, then run this again. \
On Debian these are: ${kPackages[*]} python3-dev python3-venv"
}

check_python() {
  "$host_python" - <<'PY' || die "$host_python cannot be used: set PYTHON=<a Python 3.11 or newer with its headers>"
import os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if sys.version_info < (3, 11):
    sys.exit(f"Python {sys.version.split()[0]} is older than 3.11")
if not os.path.exists(header):
    sys.exit(f"{header} is missing (Debian: apt-get install python3-dev)")
PY
}

python_packages() {
  local stamp="$SMP_VENV/.requirements" wanted
  wanted="$(cat requirements/*.txt)"
  if [[ -x "$SMP_PYTHON" && -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    return
  fi
  check_python
  if [[ ! -x "$SMP_PYTHON" ]]; then
    say "Creating .venv with $("$host_python" --version)"
    "$host_python" -m venv "$SMP_VENV"
  fi
  say "Installing Python packages"
  "$SMP_PYTHON" -m pip install --quiet --requirement requirements/dev.txt
  rm -rf "$SMP_VENV/transformers5"
  "$SMP_PYTHON" -m pip install --quiet --no-deps --target "$SMP_VENV/transformers5" --requirement requirements/transformers5.txt
  printf '%s\n' "$wanted" >"$stamp"
}

if [[ -f /etc/debian_version ]]; then
  system_packages_debian
else
  system_packages_elsewhere
fi
python_packages
scripts/build.sh
