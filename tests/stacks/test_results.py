"""How stacks are compared: what counts as equal, and what the tables and the JSON say of it."""

import dataclasses
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.stacks import environments
from tests.stacks.environments import (
    Stack,
    StackError,
    error_line,
    find_python,
    make_environment,
    possible_stacks,
    run_command,
)
from tests.stacks.results import Result, Results, bits_table, parse_report, readings_table, report_lines

OLDEST, NEWEST = Stack("3.11", "2.13.0", "0.16.1"), Stack("3.12", "2.15.0", "0.19.2", without_triton=True)
BITS = {"a bf16 dropout": "0f" * 8, "b fp32 delay": "1e" * 8}


def made(stack: Stack, **changes: object) -> Result:
    plain = Result(stack=stack, date="2026-11-27", command="python -m tests.stacks", bits=BITS)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]  # any field may be given


def of(*results: Result) -> Results:
    return Results({result.stack: result for result in results})


def test_a_report_is_read_as_it_was_printed() -> None:
    report = {**BITS, "read by torch": "ModuleNotFoundError: No module named 'x'"}
    assert parse_report("saved to /a\n" + report_lines(report) + "\n") == report


def test_equal_bits() -> None:
    results = of(made(OLDEST), made(NEWEST))
    assert [results.verdict(each) for each in results.by_stack.values()] == ["reference", "equal"]
    assert results.are_equal()


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [
        ({**BITS, "b fp32 delay": "00" * 8}, "differs: b fp32 delay"),
        ({"a bf16 dropout": "0f" * 8}, "differs: b fp32 delay"),
        ({**BITS, "c": "00" * 8}, "differs: c"),
    ],
)
def test_unlike_bits_are_named(bits: dict[str, str], verdict: str) -> None:
    results = of(made(OLDEST), made(NEWEST, bits=bits))
    assert results.verdict(results.by_stack[NEWEST]) == verdict
    assert f"| {verdict} |" in bits_table(results)
    assert not results.are_equal()


def test_an_error_is_neither_equal_nor_the_reference() -> None:
    failed = made(OLDEST, bits={}, error="ImportError: no")
    results = of(failed, made(NEWEST))
    assert results.reference == results.by_stack[NEWEST]
    assert results.verdict(failed) == "error: ImportError: no"
    assert not results.are_equal()


def test_checkpoints_are_compared_with_what_their_writer_reads() -> None:
    results = of(made(OLDEST), made(NEWEST))
    results.readings = {("x", "x"): {"weights": "0f"}, ("x", "y"): {"weights": "0f"}}
    assert results.are_equal()
    assert "| x | y | nothing |" in readings_table(results)
    results.readings["x", "y"] = {"weights": "ImportError: no"}
    assert not results.are_equal()
    assert "| x | y | weights: ImportError: no |" in readings_table(results)


def test_results_are_kept(tmp_path: Path) -> None:
    results = of(made(OLDEST, torch_build="2.13.0+cpu", seconds=3.5), made(NEWEST, tests="3 passed"))
    results.readings = {("x", "x"): {"weights": "0f"}}
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


def test_a_row_for_the_table_of_tried_versions() -> None:
    results = of(made(OLDEST, torch_build="2.13.0+cpu"), made(NEWEST))
    row = results.row(results.by_stack[NEWEST])
    assert (row["python"], row["megatron_core"], row["torch"]) == ("3.12", "0.19.2", "2.15.0")
    (run,) = row["runs"]
    expected = "the 2 trainings have the bits of Python 3.11, torch 2.13.0+cpu, megatron-core 0.16.1"
    assert (run["kind"], run["device"], run["result"]) == ("bits", "CPU", expected)


def test_newer_megatron_cores_need_a_newer_python() -> None:
    stacks = possible_stacks(("3.11", "3.12"), ("2.15.0",), ("0.16.1", "0.19.2"), without_triton=False)
    assert [(stack.python, stack.megatron_core) for stack in stacks] == [
        ("3.11", "0.16.1"),
        ("3.12", "0.16.1"),
        ("3.12", "0.19.2"),
    ]


def test_constraints_pin_what_varies_once() -> None:
    lines = list(environments._constraints(NEWEST))
    assert [line for line in lines if line.startswith(("torch=", "megatron-core"))] == [
        "torch==2.15.0",
        "megatron-core==0.19.2",
    ]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {line for line in pinned if line.startswith("numpy")} <= set(lines)


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"found no Python 2\.6 that runs"):
        find_python("2.6")
    with pytest.raises(StackError, match=r"found no Python 2\.6 that runs"):
        make_environment(Stack("2.6", "2.15.0", "0.19.2"), tmp_path)


def test_a_failure_has_the_line_that_names_its_error() -> None:
    with pytest.raises(StackError, match=r"^ZeroDivisionError: division by zero$"):
        run_command("python3", "-c", "1 / 0")
    assert error_line("Traceback\n  File\nImportError: no\n  more of it\n") == "ImportError: no"
