#!/usr/bin/env bash
# All checks on a fresh machine: lint, types, unit, distributed and end-to-end tests.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh --fast     without the tests marked slow, in under three minutes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

select=()
case "${1:-}" in
    '') ;;
    --fast) select=(-m 'not slow') ;;
    *) echo "usage: bash scripts/test.sh [--fast]" >&2; exit 2 ;;
esac
prepare_environment '[test]'

echo "== lint and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
.venv/bin/mypy

echo "== tests"
# Ranks compute on one thread each; more would only get in each other's way.
export OMP_NUM_THREADS=1
"$python" -m pytest "${select[@]}"
