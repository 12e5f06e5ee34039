#!/usr/bin/env bash
# obstore's create-only put into a folder needs hard links.
#
# Expected: put(mode="create") on a LocalStore works wherever a plain put works, or says that the file system lacks
# hard links. Conditional puts are what leases, commits and table formats build on.
# Seen: on a file system that refuses link(2) (BeeGFS before 8 between folders, gcsfuse, most CIFS mounts), plain puts
# work, create-only puts fail with GenericError "Unable to rename file: Operation not permitted": the message names a
# rename, while the call that was refused is a link.
# Version: obstore 0.12.1 (object_store's LocalFileSystem), Linux, CPython 3.11.
# Source: https://docs.rs/object_store/latest/object_store/enum.PutMode.html (Create),
# https://github.com/GoogleCloudPlatform/gcsfuse/issues/178 (no hard links), https://github.com/NixOS/nix/issues/3748
# (EPERM of BeeGFS). The refusal is played by a preloaded link() and linkat(); needs a C compiler.
# Exits with 0 as long as it is so, with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1

cat > "$folder/nolinks.c" <<'C'
#include <errno.h>
int link(const char *from, const char *to) { (void)from; (void)to; errno = EPERM; return -1; }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    (void)a; (void)from; (void)b; (void)to; (void)flags; errno = EPERM; return -1;
}
C
cc -shared -fPIC -o "$folder/nolinks.so" "$folder/nolinks.c"

cat > "$folder/puts.py" <<'PYTHON'
import sys
from importlib.metadata import version

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore

store = LocalStore(sys.argv[1], mkdir=True)
print("obstore", version("obstore"))
for mode in ("overwrite", "create"):
    try:
        obstore.put(store, mode, b"content", mode=mode)
        print(f"put(mode={mode!r}): done")
    except BaseError as error:
        print(f"put(mode={mode!r}): {type(error).__name__}: {str(error).splitlines()[0]}")
PYTHON

echo "-- with hard links"
"$folder/venv/bin/python" "$folder/puts.py" "$folder/with" | tee "$folder/with.txt"
echo "-- link(2) refused with EPERM"
LD_PRELOAD="$folder/nolinks.so" "$folder/venv/bin/python" "$folder/puts.py" "$folder/without" | tee "$folder/without.txt"

test "$(grep -c ': done' "$folder/with.txt")" = 2
grep -q "put(mode='overwrite'): done" "$folder/without.txt"
grep -q "put(mode='create'): GenericError: Generic LocalFileSystem error: Unable to rename file: Operation not permitted" \
    "$folder/without.txt"
