"""``hetero doctor --etcd``: what of an elastic job others can reach, and whether etcd and copies have TLS."""

import asyncio
import dataclasses
import json
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.doctor.findings import Finding
from hetero.elastic import job_network
from hetero.elastic.copy_server import CopyServer
from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.job_network import check_copies, check_etcd, check_job_network
from hetero.elastic.membership import Membership
from tests.helpers.certificates import make_certificates
from tests.helpers.etcd import EtcdServer
from tests.helpers.job_records import node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder, "ours")
    return folder


def only(findings: tuple[Finding, ...], subject: str) -> Finding:
    (found,) = (each for each in findings if each.subject == f"job: {subject}")
    return found


@pytest.mark.parametrize(
    ("url", "severity"), [("http://127.0.0.1:2379", "warning"), ("http://10.0.0.1:2379", "problem")]
)
def test_an_etcd_without_tls(url: str, severity: str) -> None:
    found = check_etcd(url, EtcdAddress(urls=(url,)))
    assert found.severity == severity
    assert "who reaches etcd owns the job" in found.found
    assert "certificates" in found.todo


@pytest.mark.parametrize(("asks_clients", "severity"), [(True, "ok"), (False, "problem")])
def test_an_etcd_with_tls_is_asked_without_a_certificate(
    tmp_path: Path, certificates: Path, asks_clients: bool, severity: str
) -> None:
    """TLS alone keeps nobody out: etcd has to ask for a certificate."""
    pair = certificates / "ours.pem", certificates / "ours.key"
    etcd = EtcdServer(tmp_path / "etcd", tls=pair, asks_clients=asks_clients)
    etcd.start()
    try:
        findings = check_job_network(etcd.address, "job")
    finally:
        etcd.stop()
    found = only(findings, "etcd")
    assert found.severity == severity, found
    assert ("answers without a certificate" in found.found) == (not asks_clients)
    assert only(findings, "copies").found == "no node is in job job: nothing can be said of its copies"


def test_an_etcd_that_is_not_there_is_one_problem(tmp_path: Path, certificates: Path) -> None:
    """Nothing is said of who it lets in."""
    etcd = EtcdServer(tmp_path / "etcd", tls=(certificates / "ours.pem", certificates / "ours.key"))
    (found,) = check_job_network(etcd.address, "job")
    assert (found.severity, found.subject) == ("problem", "job: etcd")
    assert "does not answer" in found.found
    assert "--etcd" in found.todo


def test_copies_with_tls_and_without(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are asked for a handshake. Those without TLS are worth a warning where others could listen."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "ours.pem", certificates / "ours.key")

    async def judged() -> list[Finding]:
        servers = {
            name: CopyServer(tmp_path, job="job", node=name, token="none", tls=tls if name == "secret" else None)
            for name in ("secret", "plain")
        }
        nodes = [
            dataclasses.replace(node(name), port=await server.start("127.0.0.1")) for name, server in servers.items()
        ]
        findings = await asyncio.to_thread(lambda: list(check_copies([*nodes, node("away")], "job")))
        for server in servers.values():
            await server.stop()
        return findings

    findings = {each.found: each.severity for each in asyncio.run(judged())}
    assert findings == {
        "served by TLS: secret": "ok",
        "served without TLS, on loopback: plain": "ok",
        "not reached from here: away": "ok",
    }
    monkeypatch.setattr(job_network, "is_loopback", lambda host: False)
    (warning,) = (each for each in asyncio.run(judged()) if each.severity == "warning")
    assert warning.found.endswith("reads the token and the weights: plain")
    assert "certificates" in warning.todo


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_command(
    join: Callable[..., Membership], etcd: EtcdServer, job: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was found of the job stands in the checklist of this host, and in the document."""
    join("a")
    main(["doctor", "--etcd", etcd.url, "--job", job, "--json"])
    findings = json.loads(capfd.readouterr().out)["findings"]
    subjects = [each["subject"] for each in findings]
    assert "operating system" in subjects
    assert subjects[-2:] == ["job: etcd", "job: copies"]
    assert findings[-1]["found"] == "not reached from here: a"


@pytest.mark.parametrize("flag", ["--certificates", "--etcd-ca"])
def test_a_flag_of_etcd_alone_asks_for_the_job_too(
    flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with it is said, and no checklist without the job."""
    assert main(["doctor", flag, str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_a_launch_does_not_look_at_a_job(
    etcd: EtcdServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--etcd", etcd.url]) == 2
    assert capfd.readouterr().err.startswith("hetero: --etcd has no effect under torchrun")
