"""Certificates of tests, each signed by itself and made out to 127.0.0.1."""

import subprocess
from pathlib import Path


def make_certificates(folder: Path, *names: str, days: int = 1) -> None:
    """Make ``NAME.pem`` and ``NAME.key`` in a new folder; with negative ``days`` they have expired."""
    folder.mkdir()
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:TRUE\n")
    for name in names:
        key, request = folder / f"{name}.key", folder / f"{name}.csr"
        _openssl(
            "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes",
            keyout=key,
            out=request,
            subj=f"/CN={name}",
        )
        _openssl(
            f"x509 -req -days {days}",
            signkey=key,
            extfile=folder / "extensions",
            out=folder / f"{name}.pem",
            **{"in": request},
        )


def _openssl(words: str, **options: object) -> None:
    given = [word for name, value in options.items() for word in (f"-{name}", str(value))]
    subprocess.run(["openssl", *words.split(), *given], check=True, capture_output=True)
