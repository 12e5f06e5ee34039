"""The report that people paste into an issue has what was asked for, whatever came of the tests."""

import datetime
from pathlib import Path

import pytest

from hetero.doctor.findings import Diagnosis
from hetero.doctor.host_checks import check_host
from hetero.serialization import save
from tests.gpu.report import TestOutcome, main, outcomes, report
from tests.unit.doctor.samples import A100, host, torch_of

JUNIT = """<testsuites><testsuite name="pytest" tests="3">
<testcase classname="tests.gpu.test_overlap" name="test_runs[cuda]" time="1.25" />
<testcase classname="tests.gpu.test_single_rank" name="test_half[a|b]" time="0.5">
<failure message="assert 1 == 2&#10;  where">E  assert</failure></testcase>
<testcase classname="tests.gpu.test_single_rank" name="test_te" time="0.0">
<skipped type="pytest.skip" message="TransformerEngine is not installed">x</skipped></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_from_junit() -> None:
    assert outcomes(JUNIT) == [
        TestOutcome("gpu/test_overlap::test_runs[cuda]", "passed", 1.25),
        TestOutcome("gpu/test_single_rank::test_half[a|b]", "FAILED", 0.5, "assert 1 == 2"),
        TestOutcome("gpu/test_single_rank::test_te", "skipped", 0.0, "TransformerEngine is not installed"),
    ]


def test_the_page() -> None:
    facts = host(torch=torch_of(A100, num_gpus=1), open_files=256)
    assert facts.torch is not None
    diagnosis = Diagnosis(hosts=(facts,), findings=check_host(facts))
    page = report(diagnosis, outcomes(JUNIT), today=datetime.date(2026, 11, 22), more=["the end"])
    assert page.startswith("## GPU report, 2026-11-22\n\n* Linux")
    for said in (
        "driver 580.95.05, CUDA up to 13.0",
        "1 x NVIDIA A100-SXM4-40GB",
        f"torch {facts.torch.version}, CUDA 13.0, cuDNN 9.10.2, NCCL 2.29.7",
        "transformer-engine 2.11.0, flash-attn -",
        "**Tests:** 1 FAILED, 1 passed, 1 skipped",
        r"| gpu/test_single_rank::test_half[a\|b] | FAILED | 0.5 | assert 1 == 2 |",
        "* warning: ulimit -n (open files): 256",
    ):
        assert said in page
    assert page.endswith("the end")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = host()
    save(Diagnosis(hosts=(facts,), findings=check_host(facts)), tmp_path / "doctor.json")
    (tmp_path / "junit.xml").write_text(JUNIT)
    (tmp_path / "bench.txt").write_text("dp2   1.0\n")
    files = ["--doctor", tmp_path / "doctor.json", "--junit", tmp_path / "junit.xml", "--bench", tmp_path / "bench.txt"]
    assert main([str(each) for each in files]) == 1, "a test has failed"
    assert "```\ndp2   1.0\n```" in capsys.readouterr().out
