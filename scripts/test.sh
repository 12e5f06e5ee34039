#!/usr/bin/env bash
# All checks on a fresh machine: lint, types, unit, distributed and end-to-end tests. docs/testing.md says how they work.
#
#   bash scripts/test.sh                     of the cases that rotate, those whose turn it is; all others
#   bash scripts/test.sh --fast              without the tests marked slow
#   bash scripts/test.sh --all               every case
#   bash scripts/test.sh --rotation 7        the cases of another run again
#   bash scripts/test.sh --workers 2         two files at a time; otherwise three, and two with --fast
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

chosen=() options=() workers=''
while [ $# -gt 0 ]; do
    case "$1" in
        --fast) chosen=(-m 'not slow') ;;
        --all) options+=(--all) ;;
        --workers) workers="${2:?--workers needs a number}"; shift ;;
        --rotation) options+=(--rotation "${2:?--rotation needs a number}"); shift ;;
        *) echo "usage: bash scripts/test.sh [--fast | --all] [--rotation N] [--workers N]" >&2; exit 2 ;;
    esac
    shift
done
# A third of the whole run's seconds are waits, and hardly any of the fast one's: on two cores, a worker for them.
: "${workers:=$(if [ ${#chosen[@]} -eq 0 ]; then echo 3; else echo 2; fi)}"
prepare_environment '[test]'
prepare_etcd
prepare_openssl
prepare_slurm

echo "== lint and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
.venv/bin/mypy

# Ranks compute on one thread each; more would only get in each other's way.
export OMP_NUM_THREADS=1
# Some hundred processes import the same files: compile them once.
unset PYTHONDONTWRITEBYTECODE
exit_code=0
# Exit code 1 says that tests failed; any other ends this script.
noted() { "$@" || { [ $? -eq 1 ] && exit_code=1; }; }
tests=("$python" -m pytest "${options[@]}")
echo "== tests, $workers files at a time"
rm -rf .pytest_cache
share="$(mktemp -d)"
run=''
trap '[ -z "$run" ] || kill -INT "$run" || true; rm -rf "$share"' EXIT
"$python" -m tests.helpers.workers "$workers" \
    "${options[@]}" -q -o console_output_style=times --share-files="$share" "${chosen[@]}" &
run=$!
noted wait "$run"
run=''
if [ "$exit_code" -eq 1 ]; then
    echo "== what a busy machine may have made fail, once more with nothing beside it"
    exit_code=0
    noted "${tests[@]}" --second-chance
fi
exit "$exit_code"
