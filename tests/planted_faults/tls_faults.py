"""Faults of certificates: who reaches etcd, and whose copies are taken."""

from tests.planted_faults.fault import Fault

TLS_FAULTS = (
    Fault(
        name="a server of copies may show any certificate",
        kind="missing check",
        file="hetero/elastic/copy_tls.py",
        find="    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN\n",
        replace="    context.verify_mode = ssl.CERT_NONE\n",
        hints=("tests/unit/elastic/test_certificates.py",),
    ),
    Fault(
        name="what an authority has signed is trusted for ever",
        kind="missing check",
        file="hetero/elastic/copy_tls.py",
        find="    if not trust.is_authority:\n",
        replace="    if trust.file:\n",
        hints=("tests/unit/elastic/test_certificates.py",),
    ),
    Fault(
        name="a range that is encrypted ends after its first piece",
        kind="wrong slice",
        file="hetero/elastic/copy_server.py",
        find="for offset in range(start, end + 1, _TLS_CHUNK_BYTES):",
        replace="for offset in range(start, start + 1, _TLS_CHUNK_BYTES):",
        hints=("tests/unit/elastic/test_copy_server.py",),
    ),
    Fault(
        name="the port of etcd's members asks for no certificate",
        kind="missing check",
        file="hetero/commands/elastic_store.py",
        find='f"{scheme}://127.0.0.1:{peer_port}"',
        replace='f"http://127.0.0.1:{peer_port}"',
        hints=("tests/elastic/test_etcd_tls.py",),
    ),
    Fault(
        name="each start of etcd makes another authority, which no client knows",
        kind="state left behind",
        file="hetero/elastic/certificate_authority.py",
        find="    if files.certificate.exists():\n",
        replace="    if not files:\n",
        hints=("tests/unit/elastic/test_certificates.py",),
    ),
    Fault(
        name="a group may read the keys in a folder of certificates",
        kind="missing check",
        file="hetero/elastic/certificate_folder.py",
        find="stat.S_IMODE(status.st_mode) & 0o077:",
        replace="stat.S_IMODE(status.st_mode) & 0o007:",
        hints=("tests/unit/elastic/test_certificates.py",),
    ),
    Fault(
        name="nodes of one job serve copies in plain HTTP and by TLS",
        kind="missing check",
        file="hetero/elastic/job_settings.py",
        find="    if there.copy_transport != here.copy_transport:\n",
        replace="    if there.copy_transport > here.copy_transport:\n",
        hints=("tests/unit/elastic/test_certificates.py",),
    ),
    Fault(
        name="an etcd in plain HTTP on another host goes without a warning",
        kind="wrong report",
        file="hetero/elastic/etcd.py",
        find='part.scheme == "http" and not is_loopback(',
        replace='part.scheme == "http" and is_loopback(',
        hints=("tests/elastic/test_commands.py",),
    ),
)
