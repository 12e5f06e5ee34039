#!/usr/bin/env bash
# All checks on a fresh machine: lint, types, unit, distributed and end-to-end tests. docs/testing.md says how they work.
#
# Two lanes, one after the other. 1: all tests in .venv, with Python 3.11 and megatron-core 0.16.1 (with another Python
# where 3.11 is missing or .venv has one). 2: the tests marked newest_stack in .venv-newest, with Python 3.12,
# megatron-core 0.19.2 and a torch without Triton. The last lines say what each ran with, and its result.
#
#   bash scripts/test.sh                     of the cases that rotate, those whose turn it is; all others
#   bash scripts/test.sh --fast              without the tests marked slow
#   bash scripts/test.sh --all               every case
#   bash scripts/test.sh --rotation 7        the cases of another run again
#   bash scripts/test.sh --workers 2         two files at a time; otherwise three, and two with --fast
#   bash scripts/test.sh --lane 2            only that lane
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

lanes='1 2' marks='' options=() workers=''
while [ $# -gt 0 ]; do
    case "$1" in
        --fast) marks='not slow' ;;
        --all) options+=(--all) ;;
        --workers) workers="${2:?--workers needs a number}"; shift ;;
        --rotation) options+=(--rotation "${2:?--rotation needs a number}"); shift ;;
        --lane)
            lanes="${2:-}"
            case "$lanes" in 1 | 2) shift ;; *) echo "scripts: --lane needs 1 or 2" >&2; exit 2 ;; esac ;;
        *)
            echo "usage: bash scripts/test.sh [--fast | --all] [--rotation N] [--workers N] [--lane 1|2]" >&2
            exit 2 ;;
    esac
    shift
done
# A third of the whole run's seconds are waits, and hardly any of the fast one's: on two cores, a worker for them.
: "${workers:=$(if [ -z "$marks" ]; then echo 3; else echo 2; fi)}"

prepare_etcd
prepare_openssl
prepare_slurm

# Ranks compute on one thread each; more would only get in each other's way.
export OMP_NUM_THREADS=1
# Some hundred processes import the same files: compile them once.
unset PYTHONDONTWRITEBYTECODE

exit_code=0 results=() run='' share=''
# Where the first lane leaves what trainings gave bit by bit, for the second one to compare with.
MEGATRON_HETERO_DIGESTS="$(mktemp -d)"
export MEGATRON_HETERO_DIGESTS
end() {
    [ -z "$run" ] || { kill -TERM "$run" && wait "$run"; } || true
    rm -rf "$MEGATRON_HETERO_DIGESTS" ${share:+"$share"}
}
trap end EXIT
# A signal ends this script, and not one lane alone.
trap 'exit 130' INT
trap 'exit 143' TERM

# fail RESULT CODE : the lane that runs has failed; the script goes on, and ends with the first such code.
fail() {
    results+=("lane $lane: $1")
    [ "$exit_code" -ne 0 ] || exit_code="$2"
}

# run_tests PYTHON CACHE MARKS : those with these marks; what a busy machine may have made fail, once more.
run_tests() {
    local code=0 first chosen=(-o "cache_dir=$2" "${options[@]}")
    [ -z "$3" ] || chosen+=(-m "$3")
    echo "== lane $lane: tests, $workers files at a time"
    rm -rf "$2"
    share="$(mktemp -d)"
    "$1" -m tests.helpers.workers "$workers" "${chosen[@]}" -q -o console_output_style=times --share-files="$share" &
    run=$!
    wait "$run" || code=$?
    run=''
    first="$("$1" -m tests.helpers.lanes describe "$share")"
    rm -rf "$share"
    if [ "$code" -eq 1 ]; then
        echo "== lane $lane: what a busy machine may have made fail, again, with nothing else running"
        code=0
        "$1" -m pytest "${chosen[@]}" --second-chance || code=$?
        [ "$code" -ne 0 ] || first+=', and passed when run again'
    fi
    if [ "$code" -eq 0 ]; then results+=("lane $lane: $first"); else fail "$first; FAILED (exit code $code)" "$code"; fi
}

lane=1
if [[ $lanes == *1* ]]; then
    prepare_environment .venv '[test]' 3.11 3 3.12 3.13
    echo "== lint and types"
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/lint-imports
    .venv/bin/mypy
    run_tests .venv/bin/python .pytest_cache "$marks"
fi

lane=2
if [[ $lanes == *2* ]]; then
    installer=install_with_uv
    if [ ! -e .venv-newest ] && ! find_python 3.12 > /dev/null; then
        results+=("lane 2: NOT RUN, for no Python 3.12 was found: neither a python3.12 that runs, nor in pyenv's or uv's folders")
        echo "== ${results[-1]}"
    elif ! prepare_environment .venv-newest '[test]' 3.12; then
        fail "NOT RUN, its environment could not be made" 1
    elif ! .venv-newest/bin/python -m pip uninstall --quiet --yes triton || ! .venv-newest/bin/python -m tests.helpers.lanes check; then
        fail "NOT RUN, its environment is not what it should be" 1
    else
        run_tests .venv-newest/bin/python .venv-newest/.pytest_cache "newest_stack${marks:+ and $marks}"
    fi
fi

echo "== results"
printf '%s\n' "${results[@]}"
exit "$exit_code"
