"""No suite runs the benches of ``tests/bench``, but they begin, and what they replace elsewhere is there.

All else that they read of other modules is for mypy to find.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.bench_programs import BENCH, programs

ROOT = Path(__file__).parents[2]

NEED_TORCH = {
    *("bench_building", "bench_change", "bench_copies", "bench_emulation", "bench_etcd_requests", "bench_host_adamw"),
    *("bench_idle_connections",),
    *("bench_offload", "bench_offload_account", "bench_recovery", "bench_spot_replay", "bench_token_ids"),
    *("bench_unequal_cpus", "bench_uniform"),
}
"""Programs whose imports take seconds."""


def _read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def helps() -> Mapping[str, str | None]:
    """What each program says to ``--help``, without torch."""
    command = [sys.executable, "-m", "tests.helpers.bench_programs"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: Mapping[str, str | None] = json.loads(ran.stdout)
    return found


def test_only_benches_that_train_need_torch(helps: Mapping[str, str | None]) -> None:
    assert {program for program, said in helps.items() if said is None} == NEED_TORCH


@pytest.mark.parametrize("program", [each for each in programs() if each not in NEED_TORCH])
def test_a_bench_begins(program: str, helps: Mapping[str, str | None]) -> None:
    said = helps[program]
    assert said is not None
    assert said.startswith(f"usage: {program}")
    summary = (ast.get_docstring(_read(BENCH / f"{program}.py")) or "").splitlines()[0]
    assert "".join(summary.split()) in "".join(said.split())


def replaced(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of each ``patch.object(module, "name", ...)``; mypy does not see that there is no such name."""
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="object"), args=[ast.Name(id=of), ast.Constant(value=str(name)), *_]):
                yield modules[of], name


def names_of(module: str) -> set[str]:
    """What a module of the repository imports or makes under which name."""
    found: set[str] = set()
    for node in _read(ROOT / f"{module.replace('.', '/')}.py").body:
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


REPLACED = sorted({pair for program in programs() for pair in replaced(_read(BENCH / f"{program}.py"))})


def test_benches_replace_something() -> None:
    assert ("hetero.planner.improve.passes", "PASSES") in REPLACED


@pytest.mark.parametrize(("module", "name"), REPLACED)
def test_what_benches_replace_is_there(module: str, name: str) -> None:
    assert name in names_of(module)
