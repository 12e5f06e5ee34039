# Sourced by the other scripts: makes .venv in the repository with this project and its pinned dependencies.
#
#   prepare_environment EXTRAS      e.g. prepare_environment '[train]' or prepare_environment '[test]'; '' plans only
#
# Does nothing if .venv already holds what setup.py and constraints.txt ask for.

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

prepare_environment() {
    local extras="$1" base wanted stamp="$repository/.venv/.installed"
    wanted="$(cd "$repository" && echo "$extras" | cat - setup.py constraints.txt | cksum)"
    if [ -f "$stamp" ] && grep -qxF "$wanted" "$stamp"; then
        return
    fi
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
    echo "$wanted" >> "$stamp"
}
