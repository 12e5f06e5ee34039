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
