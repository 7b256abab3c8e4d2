#!/usr/bin/env bash
# setup.sh [demo|test|lint]: makes a clone ready for that (test by default) and for nothing else: system packages, .venv, the
# compiled package. Safe to repeat; does only what is missing.
set -euo pipefail
source "$(dirname "$0")/env.sh"

readonly kPurpose="${1:-test}"
readonly kDemoPackages=(g++ cmake ccache openmpi-bin libopenmpi-dev)
readonly kTestPackages=(libgtest-dev)
readonly kLintPackages=(clang-format clang-tidy)
case "$kPurpose" in
  demo) packages=("${kDemoPackages[@]}") tools=() ;;
  test) packages=("${kDemoPackages[@]}" "${kTestPackages[@]}") tools=() ;;
  lint) packages=("${kDemoPackages[@]}" "${kTestPackages[@]}" "${kLintPackages[@]}") tools=(clang-format clang-tidy) ;;
  *) die "setup.sh got '$kPurpose': demo, test or lint" ;;
esac
host_python="${PYTHON:-python3}"

# Of the arguments, those packages that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || echo "$package"
  done
}

# Before anything is fetched.
check_root() {
  [[ $# -eq 0 || $(id -u) -eq 0 ]] || die "missing system packages: $*. Install them with: sudo apt-get install $*"
}

install_packages() {
  [[ $# -gt 0 ]] || return 0
  say "Installing system packages: $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
}

check_tools() {
  local missing=() tool
  for tool in g++ cmake mpirun mpicc "${tools[@]}" "$host_python"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [[ ${#missing[@]} -eq 0 ]] || die "not found: ${missing[*]}. Install a C++20 compiler (GCC 12 or newer), CMake 3.25 or newer, \
Open MPI with headers, for tests GoogleTest, for lint clang-format and clang-tidy, and Python 3.11 or newer with headers, \
then run this again. On Debian these are: ${packages[*]} python3-dev python3-venv"
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

# A stamp of each file of requirements says what was installed for it: build < demo < test < lint, each with those before it.
stamp() { echo "$SMP_VENV/.requirements-$1"; }
wanted() { cat requirements/*.txt; }
is_installed() { [[ -f "$(stamp "$1")" && "$(<"$(stamp "$1")")" == "$(wanted)" ]]; }

pip_install() {
  is_installed "$1" && return
  say "Installing Python packages: requirements/$1.txt"
  "$SMP_PYTHON" -m pip install --quiet --requirement "requirements/$1.txt"
  if [[ $1 == test || $1 == lint ]] && ! is_installed test; then
    rm -rf "$SMP_VENV/transformers5"
    "$SMP_PYTHON" -m pip install --quiet --no-deps --target "$SMP_VENV/transformers5" --requirement requirements/transformers5.txt
  fi
  local purpose
  for purpose in build demo test lint; do
    wanted >"$(stamp "$purpose")"
    [[ $purpose != "$1" ]] || break
  done
}

# When this script ends early, what installs Python packages beside the compiler begins no further command; one that runs, and apt, end by
# themselves.
background=()
trap '[[ ${#background[@]} -eq 0 ]] || kill "${background[@]}" 2>/dev/null || true' EXIT

# System packages come while pip fetches torch; but Debian's own interpreter has its headers and venv from packages too.
apt_process=
if [[ -f /etc/debian_version ]]; then
  if [[ "$(command -v "$host_python" || true)" =~ ^(/usr)?/bin/python3$|^$ ]]; then
    mapfile -t missing < <(missing_packages python3-dev python3-venv)
    check_root "${missing[@]}"
    install_packages "${missing[@]}"
  fi
  mapfile -t missing < <(missing_packages "${packages[@]}")
  check_root "${missing[@]}"
  install_packages "${missing[@]}" &
  apt_process=$!
else
  check_tools
fi
if [[ ! -x "$SMP_VENV/bin/pip" ]]; then  # the last that is made
  check_python
  say "Creating .venv with $("$host_python" --version)"
  "$host_python" -m venv --clear "$SMP_VENV"
fi
pip_install build
[[ -z "$apt_process" ]] || wait "$apt_process"

# The compiler needs torch and nothing else of Python, so the other packages come meanwhile.
pip_install "$kPurpose" &
pip_process=$!
background+=("$pip_process")
scripts/build.sh compile "$kPurpose"
wait "$pip_process"
background=()
scripts/build.sh install "$kPurpose"
