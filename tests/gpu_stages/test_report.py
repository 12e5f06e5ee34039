"""The report that people paste into an issue has what was asked for, whatever came of the stages."""

import json
from pathlib import Path

from hetero.doctor.findings import Diagnosis
from hetero.doctor.host_checks import check_host
from hetero.serialization import save
from tests.gpu_stages.report import report, write_report
from tests.gpu_stages.results import StageResult, outcomes_file, output_file, save_result
from tests.gpu_stages.target import Target
from tests.unit.doctor.samples import A100, host, torch_of

A100_CARD = Target(device="cuda", name=A100.name, half="bf16")

TESTS = [
    {"name": "gpu/test_overlap.py::test_runs[cuda]", "outcome": "passed", "seconds": 1.25},
    {"name": "gpu/test_single_rank.py::test_half[a|b]", "outcome": "FAILED", "seconds": 0.5, "detail": "1 == 2"},
    {"name": "gpu/test_single_rank.py::test_te", "outcome": "skipped", "seconds": 0.0, "detail": "no engine"},
]


def result(name: str, outcome: str = "passed", **more: object) -> StageResult:
    made = {"shows": f"{name} works", "began": "2026-11-27T12:00:00+00:00", "commit": "abc1234", "device": A100.name}
    return StageResult(name=name, outcome=outcome, **{**made, **more})  # type: ignore[arg-type]  # of this file's callers


def test_the_page(tmp_path: Path) -> None:
    facts = host(torch=torch_of(A100, num_gpus=1), open_files=256)
    assert facts.torch is not None
    save(Diagnosis(hosts=(facts,), findings=check_host(facts)), output_file(tmp_path, "doctor"))
    outcomes_file(tmp_path, "tests-half").write_text("\n".join(map(json.dumps, TESTS)) + "\n")
    output_file(tmp_path, "bench-local").write_text("dp2   1.0\n")
    output_file(tmp_path, "steps").write_text("| a | b |\n|---|---|\n")
    for each in (
        result("bench-local", seconds=3.0, limit_s=120),
        result("doctor"),
        result("steps", "over its limit", detail="killed after 240 s with 2 processes"),
        result("tests-half", "failed", detail="exit code 1"),
        result("bench-engine", "not run", detail="TransformerEngine is not installed"),
    ):
        save_result(tmp_path, each)
    write_report(tmp_path, A100_CARD)
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("## GPU report, 20")
    assert f", {A100.name}, commit abc1234\n\n* Linux" in page
    for said in (
        "driver 580.95.05, CUDA up to 13.0",
        "1 x NVIDIA A100-SXM4-40GB",
        f"torch {facts.torch.version}, CUDA 13.0, cuDNN {facts.torch.cudnn}, NCCL 2.29.7",
        "transformer-engine 2.11.0, flash-attn -",
        "| bench-local | bench-local works | passed | 3.0 | 120 |  |",
        "| steps | steps works | over its limit | 0.0 | 0 | killed after 240 s with 2 processes |",
        "| bench-engine | bench-engine works | not run | 0.0 | 0 | TransformerEngine is not installed |",
        "**Tests:** 1 FAILED, 1 passed, 1 skipped",
        r"| gpu/test_single_rank.py::test_half[a\|b] | FAILED | 0.5 | 1 == 2 |",
        "* warning: ulimit -n (open files): 256",
        "```\ndp2   1.0\n```",
        "**steps:** steps works\n\n| a | b |",
    ):
        assert said in page, said
    # In the order in which stages run, whatever ran first.
    places = [page.index(f"| {name} | ") for name in ("doctor", "tests-half", "bench-local", "bench-engine", "steps")]
    assert places == sorted(places)


def test_a_doctor_that_failed_leaves_out_the_host(tmp_path: Path) -> None:
    output_file(tmp_path, "doctor").write_text("Traceback")
    page = "\n".join(report(tmp_path, [result("doctor", "failed", detail="exit code 1")]))
    assert "* Linux" not in page
    assert "| doctor | doctor works | failed | " in page
