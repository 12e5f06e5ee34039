# Sourced by the other scripts: makes virtual environments in the repository, with this project and its pinned dependencies.
#
#   prepare_environment FOLDER EXTRAS VERSION...    e.g. prepare_environment .venv '[train]' 3 3.11 3.12 3.13
#
# VERSION: Pythons that the environment may have; if it has to be made, the first that is found makes it. 3 is any
# `python3`. Does nothing if the environment already holds what setup.py and constraints.txt ask for; [test] is all of it.
# `installer` is install_with_pip by default, or install_with_uv. Returns 1 after a message if there is no such Python or
# the installation fails.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# find_python VERSION... : prints the path of the first that runs: on PATH, or where pyenv and uv keep theirs. A shim of
# pyenv is on PATH also for versions that are not selected, and fails.
find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in "python$version" \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*"/bin/python$version" \
            "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}/cpython-$version".*"/bin/python$version"; do
            if "$candidate" -c 'import sys, venv, ensurepip
(3, 11) <= sys.version_info < (3, 14) or sys.exit(1)
print(sys.executable)' 2> /dev/null; then
                return
            fi
        done
    done
    return 1
}

# environment_problem FOLDER : prints why this environment cannot be used, if so.
environment_problem() {
    if [ ! -x "$1/bin/python" ] || ! "$1/bin/python" -c '' 2> /dev/null; then
        echo "its Python does not run"
        return
    fi
    "$1/bin/python" - "$1" 2> /dev/null <<'PYTHON' || echo "it was left half made, or its Python was replaced"
import os, re, sys
import pip
if not os.path.exists(os.path.join(sys.argv[1], "pyvenv.cfg")):
    sys.exit()  # not made by venv, but by conda, say
activate = open(os.path.join(sys.argv[1], "bin", "activate"), encoding="utf-8").read()
made_at = re.search(r"""^\s*(?:export )?VIRTUAL_ENV=["']?(/[^"'\n]+)""", activate, re.MULTILINE)[1]
if not (os.path.exists(made_at) and os.path.samefile(made_at, sys.argv[1])):
    print(f"it was made as {made_at}, and its commands start that one")
PYTHON
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

# A real Slurm is tested where there is one, or can be, on hosts in namespaces.
prepare_slurm() {
    prepare_command slurmctld slurm-wlm munge && prepare_command ip iproute2 && prepare_command nsenter util-linux ||
        echo "scripts: without Slurm its tests are skipped (Debian, as root: apt-get install slurm-wlm munge iproute2 util-linux)" >&2
}

# Tests make certificates of their own.
prepare_openssl() {
    if prepare_command openssl openssl; then
        return
    fi
    echo "scripts: needs openssl (Debian: apt-get install openssl)" >&2
    return 1
}

# environment_checksum FOLDER EXTRAS
environment_checksum() {
    (cd "$repository" && { echo "$2"; "$1/bin/python" --version; cat setup.py constraints.txt; } | cksum)
}

# make_environment FOLDER VERSION... : nothing if it is there, runs, and is of one of these Pythons.
make_environment() {
    local venv="$1" name base problem version
    name="$(basename "$venv")"
    shift
    if [ -e "$venv" ]; then
        # uv makes environments without pip; what is installed in them stays.
        "$venv/bin/python" -c 'import pip' 2> /dev/null || "$venv/bin/python" -m ensurepip > /dev/null 2>&1 || true
        problem="$(environment_problem "$venv")"
        if [ -z "$problem" ]; then
            version="$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
            case " $* " in *" $version "*) return ;; esac
            echo "scripts: $name has Python $version, this needs one of: $*; remove it (rm -r $venv) to have it made again" >&2
            return 1
        fi
        echo "== making $name again: $problem"
    fi
    if ! base="$(find_python "$@")"; then
        echo "scripts: needs Python ${*#3 } with its venv module, found none that runs (Debian: apt-get install python3 python3-venv)" >&2
        return 1
    fi
    echo "== making $name with $("$base" --version), $base"
    "$base" -m venv --clear "$venv"
}

# install_with_pip PYTHON ARGUMENT...
install_with_pip() {
    "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

# install_with_uv PYTHON ARGUMENT... : the same in a fraction of the time, most of all torch with CUDA's libraries (3 GB).
# uv does not read pip's configuration, such as a company's index: where it fails, pip has to do it.
install_with_uv() {
    install_with_pip "$1" --constraint "$repository/constraints.txt" uv &&
        "$1" -m uv pip install --quiet --python "$1" "${@:2}" || install_with_pip "$@"
}

prepare_environment() {
    local venv="$repository/$1" extras="$2" held stamp="$repository/$1/.installed"
    shift 2
    make_environment "$venv" "$@" || return
    for held in "$extras" '[test]'; do
        if [ -f "$stamp" ] && grep -qxF "$(environment_checksum "$venv" "$held")" "$stamp"; then
            return
        fi
    done
    echo "== installing the pinned dependencies (constraints.txt) and this project into $(basename "$venv")"
    "${installer:-install_with_pip}" "$venv/bin/python" \
        --constraint "$repository/constraints.txt" --editable "$repository$extras" || return
    if [[ "$extras" == *test* ]]; then
        # The Python of TransformerEngine, without CUDA's libraries, and the wheels of megatron-core, into this environment.
        (cd "$repository" && "$venv/bin/python" -m tests.helpers.mocked_transformer_engine &&
            "$venv/bin/python" -m tests.helpers.megatron_core_wheels) || return
    fi
    environment_checksum "$venv" "$extras" >> "$stamp"
}
