"""Trains on every combination of Pythons, torches and megatron-cores, and compares the bits.

    python -m tests.stacks --python 3.11 3.12 3.13 --megatron-core 0.16.1 0.19.2 --torch 2.13.0 2.15.0
    python -m tests.stacks ... --checkpoints           each combination also reads what each other one wrote
    python -m tests.stacks ... --tests tests/dist/test_layouts.py

Each combination that is not known to break gets an environment in a folder, which stays there for the next time.
Prints one row for each: equal to the first one, or which trainings differ, or the first line of the error.
"""

import argparse
import dataclasses
import datetime
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.sources import ROOT
from tests.stacks.environments import Stack, StackError, make_environment, possible_stacks, run_command, run_module
from tests.stacks.results import Result, Results, bits_table, parse_report, readings_table

LIMIT_S = 1800.0
"""Of one program in one environment; the trainings take less than a minute of one core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all combinations train the same bits and read each other's checkpoints."""
    arguments = _parser().parse_args(argv)
    stacks = list(
        possible_stacks(
            arguments.python, arguments.torch, arguments.megatron_core, without_triton=arguments.without_triton
        )
    )
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = arguments.json or folder / "results.json"
    results = Results.load(kept)
    for stack in stacks:
        print(f"== {stack}", file=sys.stderr, flush=True)
        results.by_stack[stack] = _try(stack, folder, arguments.tests)
        results.save(kept)
    if arguments.checkpoints:
        _exchange_checkpoints(stacks, folder, results)
        results.save(kept)
    print(bits_table(results))
    if results.readings:
        print("\n" + readings_table(results))
    return 0 if results.are_equal() else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.stacks", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", required=True, metavar="VERSION", help="such as 3.11 3.12 3.13")
    parser.add_argument("--torch", nargs="+", required=True, metavar="VERSION", help="such as 2.13.0 2.15.0")
    parser.add_argument("--megatron-core", nargs="+", required=True, metavar="VERSION", help="such as 0.16.1 0.19.2")
    parser.add_argument("--without-triton", action="store_true", help="uninstall Triton, as where torch is for CPUs")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".stacks", help="of the environments (default: .stacks in the repository)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="results; those that it has are kept and compared with (default: results.json in the folder)",
    )
    parser.add_argument("--checkpoints", action="store_true", help="also let each combination read all checkpoints")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="also run these tests of the suite")
    return parser


def _try(stack: Stack, folder: Path, tests: Sequence[str]) -> Result:
    """Make the environment of ``stack``, train in it, and run ``tests``."""
    versions = f"--python {stack.python} --torch {stack.torch} --megatron-core {stack.megatron_core}"
    triton = " --without-triton" if stack.without_triton else ""
    result = Result(
        stack=stack,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        command=f"python -m tests.stacks {versions}{triton}",
    )
    try:
        python = make_environment(stack, folder)
        build = run_command(str(python), "-c", "import torch; print(torch.__version__)").strip()
        began_s = time.monotonic()
        bits = parse_report(run_module(python, "tests.stacks.bits", timeout_s=LIMIT_S))
        result = dataclasses.replace(result, torch_build=build, seconds=time.monotonic() - began_s, bits=bits)
        if tests:
            result = dataclasses.replace(result, tests=_run_tests(python, tests))
    except StackError as error:
        return dataclasses.replace(result, error=str(error))
    return result


def _run_tests(python: Path, tests: Sequence[str]) -> str:
    """Return the last line of pytest, passed or not."""
    try:
        output = run_module(python, "pytest", "-q", "-p", "no:cacheprovider", *tests, timeout_s=LIMIT_S)
    except StackError as error:
        return f"failed: {error}"
    return output.strip().splitlines()[-1]


def _exchange_checkpoints(stacks: Sequence[Stack], folder: Path, results: Results) -> None:
    """Let each of ``stacks`` write checkpoints, then each read all of them."""
    pythons = {stack: make_environment(stack, folder) for stack in stacks if results.by_stack[stack].error is None}
    for writer, python in pythons.items():
        written = folder / "checkpoints" / writer.folder_name
        shutil.rmtree(written, ignore_errors=True)
        run_module(python, "tests.stacks.checkpoints", "write", str(written), timeout_s=LIMIT_S)
    for reader, python in pythons.items():
        print(f"== {reader} reads all checkpoints", file=sys.stderr, flush=True)
        folders = [str(folder / "checkpoints" / writer.folder_name) for writer in pythons]
        report = parse_report(run_module(python, "tests.stacks.checkpoints", "read", *folders, timeout_s=LIMIT_S))
        for writer in pythons:
            prefix = f"{writer.folder_name}: "
            results.readings[str(writer), str(reader)] = {
                name.removeprefix(prefix): value for name, value in report.items() if name.startswith(prefix)
            }


if __name__ == "__main__":
    sys.exit(main())
