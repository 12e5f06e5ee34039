"""``hetero elastic store``: an etcd of one member with what jobs need, and who may reach it."""

import argparse
import os
import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.errors import ConfigError
from hetero.extras import require
from hetero.listening import is_loopback
from hetero.peer_limits import raise_descriptor_limit
from hetero.private_files import make_private_folder

if TYPE_CHECKING:
    from hetero.elastic.certificate_folder import CertificateFolder

DEFAULT_PORT = 2379
"""Of etcd for its clients."""

OWNS_JOBS = "owns their jobs: it reads the token, which opens all copies, and decides which plan runs where"
"""What everyone can do who may read and write etcd's keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreTls:
    """PEM files of etcd's certificate and key, and of the authority that has signed those of its clients."""

    certificate: Path
    key: Path
    client_ca: Path

    @classmethod
    def of_folder(cls, folder: "CertificateFolder", *, host: str) -> "StoreTls":
        """Return the files of a folder of certificates for the etcd on ``host``."""
        server = folder.server(host)
        return cls(certificate=server.certificate, key=server.key, client_ca=folder.authority.certificate)


def add_store(actions: Any) -> None:
    """Add the parser of the command."""
    parser = actions.add_parser("store", help="run an etcd for jobs on this machine, in the foreground")
    parser.add_argument("--data", type=Path, default=Path("elastic-store"), help="its folder (default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on, reached by agents (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="for agents (default: %(default)s); the next one is etcd's own"
    )
    group = parser.add_argument_group("who may connect (default: everyone who reaches the port)")
    group.add_argument(
        "--certificates",
        type=Path,
        metavar="FOLDER",
        help="those who have this folder: made with certificates if it has none, for the same flag of agents",
    )
    group.add_argument("--cert", type=Path, metavar="PEM", help="etcd's certificate, made out to --host")
    group.add_argument("--key", type=Path, metavar="PEM", help="its key")
    group.add_argument(
        "--client-ca", type=Path, metavar="PEM", help="those who show a certificate that this authority has signed"
    )
    parser.set_defaults(run=_run_store)


def _run_store(args: argparse.Namespace) -> int:
    tls = _store_tls(args)
    words = etcd_command(data=args.data, host=args.host, port=args.port, peer_port=args.port + 1, tls=tls)
    make_private_folder(args.data, fix="name another one (--data)")
    url = f"{'http' if tls is None else 'https'}://{args.host}:{args.port}"
    if tls is None:
        who = "every user of this machine" if is_loopback(args.host) else "whoever reaches this address"
        print(f"hetero: warning: etcd asks for no certificate: {who} {OWNS_JOBS}; give --certificates FOLDER")
    print(f"etcd listens on {url}; end it with Ctrl-C", flush=True)
    if args.certificates is not None:
        print(f"agents and commands: --etcd {url} --certificates {args.certificates}", flush=True)
    # etcd keeps 150 fewer connections than it may open files, and lets no other in beyond.
    raise_descriptor_limit()
    os.execvp(words[0], words)


def _store_tls(args: argparse.Namespace) -> StoreTls | None:
    """Return the files that the flags name, made where they are to be.

    Raises:
        ConfigError: some are missing or wrong, or there are two answers to who may connect.
    """
    own = {"--cert": args.cert, "--key": args.key, "--client-ca": args.client_ca}
    missing = [flag for flag, path in own.items() if path is None]
    if args.certificates is not None:
        if len(missing) < len(own):
            raise ConfigError("--certificates stands for --cert, --key and --client-ca; leave those out")
        return prepare_certificates(args.certificates, host=args.host)
    if len(missing) == len(own):
        return None
    if missing:
        raise ConfigError(
            f"hetero elastic store: {' and '.join(missing)} missing; give --cert, --key and --client-ca together: "
            "without the last one etcd would let everyone in"
        )
    tls = StoreTls(certificate=args.cert, key=args.key, client_ca=args.client_ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.client_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--cert {tls.certificate}, --key {tls.key}, --client-ca {tls.client_ca}: no certificate with its key, or "
            f"no authority: {error}; give PEM files"
        ) from None
    return tls


def prepare_certificates(path: Path, *, host: str) -> StoreTls:
    """Make a folder of certificates, or what it lacks, for the etcd on ``host``.

    Raises:
        ConfigError: as :func:`hetero.elastic.certificate_authority.make_certificates`; or its package is missing.
    """
    require("elastic", asked_by="--certificates")
    from hetero.elastic.certificate_authority import make_certificates

    return StoreTls.of_folder(make_certificates(path, host=host), host=host)


def etcd_command(*, data: Path, host: str, port: int, peer_port: int, tls: StoreTls | None) -> list[str]:
    """Return the command line of an etcd of one member.

    It listens for members as well, of which there are none: on loopback, and asking for the same certificates.

    Raises:
        ConfigError: it is not installed.
    """
    etcd = shutil.which("etcd")
    if etcd is None:
        raise ConfigError("etcd is not installed; Debian has it as etcd-server: apt-get install etcd-server")
    scheme = "http" if tls is None else "https"
    url, peer = f"{scheme}://{host}:{port}", f"{scheme}://127.0.0.1:{peer_port}"
    options = {
        "data-dir": str(data),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "logger": "zap",
        "log-level": "error",
        # Old revisions are of no use: keys are few and written often.
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": "1000",
    }
    if tls is not None:
        for prefix in ("", "peer-"):
            options |= {
                f"{prefix}cert-file": str(tls.certificate),
                f"{prefix}key-file": str(tls.key),
                f"{prefix}trusted-ca-file": str(tls.client_ca),
                f"{prefix}client-cert-auth": "true",
            }
    return [etcd, *(f"--{name}={value}" for name, value in options.items())]
