"""Certificates of tests, each signed by itself and made out to 127.0.0.1."""

import subprocess
from pathlib import Path


def make_certificates(folder: Path, *names: str) -> None:
    """Make ``NAME.pem`` and ``NAME.key`` in a new folder."""
    folder.mkdir()
    for name in names:
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run([*command.split(), *subject, *files], check=True, capture_output=True)


def make_expired_certificate(folder: Path, name: str) -> None:
    """Make ``NAME.pem`` and ``NAME.key`` in a folder; the certificate was valid for a day long ago."""
    key, request, certificate = (str(folder / f"{name}.{kind}") for kind in ("key", "csr", "pem"))
    (folder / "index").touch()
    settings = folder / "ca.cnf"
    settings.write_text(
        f"[ca]\ndefault_ca=own\n[own]\ndatabase={folder / 'index'}\nnew_certs_dir={folder}\nrand_serial=yes\n"
        "default_md=sha256\npolicy=any\nx509_extensions=names\n[any]\ncommonName=supplied\n"
        "[names]\nsubjectAltName=IP:127.0.0.1\n"
    )
    for words in (
        f"req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {key} "
        f"-out {request}",
        f"ca -selfsign -batch -config {settings} -keyfile {key} -in {request} -out {certificate} -notext "
        "-startdate 20200101000000Z -enddate 20200102000000Z",
    ):
        subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
