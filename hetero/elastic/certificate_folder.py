"""A folder with the certificates of one etcd: the authority that has signed them, and the pair that clients show.

    FOLDER/ca.pem, ca.key               the authority; its key is needed where etcd starts, and nowhere else
    FOLDER/client.pem, client.key       what agents and commands show etcd, and agents show each other
    FOLDER/server-HOST.pem, .key        what the etcd on HOST shows

:mod:`hetero.elastic.certificate_authority` makes it. Agents on hosts that do not see the folder need a copy of it with
``ca.pem``, ``client.pem`` and ``client.key``.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hetero.elastic.etcd import EtcdAddress
from hetero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """PEM files of a certificate and of its private key."""

    certificate: Path
    key: Path

    @property
    def is_complete(self) -> bool:
        """Whether both files are there."""
        return self.certificate.is_file() and self.key.is_file()


@dataclass(frozen=True, slots=True)
class CertificateFolder:
    """Names the files of a folder of certificates."""

    path: Path

    @property
    def authority(self) -> CertificatePair:
        """Return the pair of the authority that signs all certificates of the folder."""
        return self._pair("ca")

    @property
    def client(self) -> CertificatePair:
        """Return the pair that all clients show."""
        return self._pair("client")

    def server(self, host: str) -> CertificatePair:
        """Return the pair of the etcd on a host."""
        return self._pair(f"server-{host}")

    def check_is_private(self) -> None:
        """Check that no other user reads the folder or writes into it.

        Raises:
            ConfigError: it is missing, a link or a file, another user's, or others may read it or write into it.
        """
        where = f"--certificates {self.path}"
        try:
            status = self.path.stat(follow_symlinks=False)
        except OSError as error:
            raise ConfigError(
                f"{where}: {error.strerror}; name the folder that hetero elastic store --certificates has made"
            ) from None
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{where}: is a link or a file; name a folder")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{where}: belongs to another user (uid {status.st_uid}), who could read the keys; name a folder of "
                "your own"
            )
        if mode := stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"{where}: has mode {stat.S_IMODE(status.st_mode):04o}, so that other users may read the keys or "
                f"replace them ({mode:03o} has to be 000); chmod 700 {self.path}, and make new certificates in an "
                "empty folder if others had access to these"
            )

    def address(self, *urls: str) -> EtcdAddress:
        """Return the address of an etcd, with what a client needs of this folder.

        Raises:
            ConfigError: the folder is not private, or a file is missing; or a URL is none of TLS.
        """
        self.check_is_private()
        for path in (self.authority.certificate, self.client.certificate, self.client.key):
            if not path.is_file():
                raise ConfigError(
                    f"--certificates {self.path}: has no {path.name}; name the folder that hetero elastic store "
                    "--certificates has made, or one with copies of its ca.pem, client.pem and client.key"
                )
        return EtcdAddress(
            urls=urls,
            ca=str(self.authority.certificate),
            certificate=str(self.client.certificate),
            key=str(self.client.key),
        )

    def _pair(self, name: str) -> CertificatePair:
        return CertificatePair(self.path / f"{name}.pem", self.path / f"{name}.key")
