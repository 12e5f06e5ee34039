#!/usr/bin/env bash
# An installed megatron-core 0.18 or newer gives as its version the commit of whatever git repository its folder is in.
#
# Expected: megatron.core.__version__ of a released wheel is the wheel's version, wherever it is installed.
# Happens:  package_info.py runs `git rev-parse --short HEAD` in its own folder at each import, and adds what that prints:
#     a virtual environment inside a project's checkout gets the project's commit, another one after each commit. Hosts
#     with the same wheel then differ in __version__; NO_VCS_VERSION=1 switches it off. pip and importlib.metadata go on
#     to give the wheel's version.
# Version:  megatron-core 0.17.1, 0.18.2, 0.19.2 (Python 3.12, named by PYTHON312), git 2.39. Source: package_info.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git init --quiet "$folder/project"
git -C "$folder/project" -c user.name=a -c user.email=a@example.org commit --quiet --allow-empty --message first
commit=$(git -C "$folder/project" rev-parse --short HEAD)
for version in 0.17.1 0.18.2 0.19.2; do
    "${PYTHON312:-python3.12}" -m venv "$folder/project/$version"
    # Without torch, which is not needed to read this one file.
    "$folder/project/$version/bin/pip" install -q --no-deps "megatron-core==$version"
    "$folder/project/$version/bin/python" - <<'END'
import importlib.metadata
import runpy

distribution = importlib.metadata.distribution("megatron-core")
file = distribution.locate_file("megatron/core/package_info.py")
print(distribution.version, "says", runpy.run_path(str(file))["__version__"])
END
done | sed "s/$commit/COMMIT/" | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
0.17.1 says 0.17.1
0.18.2 says 0.18.2+COMMIT
0.19.2 says 0.19.2+COMMIT
END
