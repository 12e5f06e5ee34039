# Sourced by the other scripts: makes .venv in the repository with this project and its pinned dependencies.
#
#   prepare_environment EXTRAS      e.g. prepare_environment '[train]' or prepare_environment '[test]'; '' plans only
#
# Does nothing if .venv already holds what setup.py and constraints.txt ask for; [test] is all of it.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$repository/.venv/bin/python"

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "scripts: needs Python 3.11 or newer with its venv module (Debian: apt-get install python3 python3-venv)" >&2
    return 1
}

# prepare_command COMMAND PACKAGE... : installs Debian's packages, as root, where the command is missing.
prepare_command() {
    local command="$1"
    shift
    if command -v "$command" > /dev/null; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        return 1
    fi
    echo "== installing Debian's $*"
    # What a package starts is not wanted: jobs and tests start their own.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes "$@" > /dev/null ||
        { apt-get update --quiet --quiet &&
            RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes "$@" > /dev/null; }
}

# Elastic training and its tests need etcd, which is no Python package.
prepare_etcd() {
    if prepare_command etcd etcd-server; then
        return
    fi
    echo "scripts: needs etcd 3.4 or newer (Debian: apt-get install etcd-server; others: https://etcd.io/docs/latest/install)" >&2
    return 1
}

# A real Slurm is tested where there is one, or can be.
prepare_slurm() {
    prepare_command slurmctld slurm-wlm munge ||
        echo "scripts: without Slurm its tests are skipped (Debian, as root: apt-get install slurm-wlm munge)" >&2
}

# Tests make certificates of their own.
prepare_openssl() {
    if prepare_command openssl openssl; then
        return
    fi
    echo "scripts: needs openssl (Debian: apt-get install openssl)" >&2
    return 1
}

environment_checksum() {
    (cd "$repository" && echo "$1" | cat - setup.py constraints.txt | cksum)
}

prepare_environment() {
    local extras="$1" base held stamp="$repository/.venv/.installed"
    for held in "$extras" '[test]'; do
        if [ -f "$stamp" ] && grep -qxF "$(environment_checksum "$held")" "$stamp"; then
            return
        fi
    done
    if [ ! -x "$python" ]; then
        base="$(find_python)"
        echo "== making .venv with $("$base" --version)"
        "$base" -m venv "$repository/.venv"
    fi
    echo "== installing the pinned dependencies (constraints.txt) and this project into .venv"
    "$python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$repository/constraints.txt" --editable "$repository$extras"
    if [[ "$extras" == *test* ]]; then
        # The Python of TransformerEngine, without CUDA's libraries, into a folder of its own in .venv.
        (cd "$repository" && "$python" -m tests.helpers.mocked_transformer_engine)
    fi
    environment_checksum "$extras" >> "$stamp"
}
