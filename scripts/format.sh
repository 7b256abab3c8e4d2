#!/usr/bin/env bash
# Rewrites C++ and Python sources in the format that lint.sh checks.
set -euo pipefail
source "$(dirname "$0")/env.sh"

cpp_sources -print0 | xargs -0 clang-format -i
ruff check --fix-only .
ruff format .
