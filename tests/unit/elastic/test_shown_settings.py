"""What agents and ranks tell others about themselves has no credentials of URLs."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.elastic.job_settings import check_settings, settings_differences, shown_settings
from hetero.elastic.rank_reporter import RankReporter
from hetero.elastic.records import JobSettings, RankReport
from hetero.errors import ConfigError
from hetero.serialization import from_json

MARK = "mark-5817"


def settings(name: str) -> JobSettings:
    """As another version of the program may have written them into etcd."""
    return JobSettings(
        program="pretrain_gpt.py",
        flags=("--lr", "1", "--x", f"https://{name}/?X-Amz-Signature={MARK}-{name}"),
        versions={},
        object_store=f"s3://{name}:{MARK}@{name}/run",
    )


def test_differences_of_settings_show_no_secret_of_either_side() -> None:
    assert settings_differences(settings("job"), settings("agent")) == [
        "flags: here https://agent/?X-Amz-Signature=***, in the job https://job/?X-Amz-Signature=***",
        "--object-store is s3://***@agent/run here and s3://***@job/run in the job",
    ]
    with pytest.raises(ConfigError, match="does not fit to its job") as refused:
        check_settings(settings("job"), settings("agent"))
    assert MARK not in str(refused.value)


def test_settings_are_shown_without_secrets() -> None:
    shown = shown_settings(settings("job"))
    assert MARK not in repr(shown)
    assert (shown.flags[:3], shown.object_store) == (("--lr", "1", "--x"), "s3://***@job/run")
    assert shown_settings(shown) == shown


def test_a_rank_reports_its_error_without_secrets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "reports"))
        agent.settimeout(5)
        assignment = SimpleNamespace(epoch=SimpleNamespace(number=1), reports=str(tmp_path / "reports"))
        reporter = RankReporter(assignment, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=MARK), reporter.of_failures():
            raise ValueError(f"GET https://host/?sig={MARK}")
        report = from_json(RankReport, agent.recv(10_000).decode(), source="")
    assert report.detail == "ValueError: GET https://host/?sig=***"
