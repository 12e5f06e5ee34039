"""Every command of every page is one that its program takes, and some test runs that program."""

from pathlib import Path

import pytest

from tests.helpers.page_commands import NOT_RUN, RUN_BY, commands_in, commands_of, problem_of, program_of
from tests.helpers.sources import ROOT, name, text

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_read_by_their_programs(page: Path) -> None:
    problems = [f"{command}: {problem}" for command in commands_of(page) if (problem := problem_of(command))]
    assert problems == []


def test_every_program_is_run_by_a_test_or_has_a_reason() -> None:
    programs = {program for page in PAGES for command in commands_of(page) if (program := program_of(command))}
    assert programs - RUN_BY.keys() - NOT_RUN.keys() == set()
    assert NOT_RUN.keys() - programs == set(), "no page names them any more"


@pytest.mark.parametrize(("program", "test"), RUN_BY.items(), ids=RUN_BY)
def test_the_tests_name_what_they_run(program: str, test: str) -> None:
    last = program.split()[-1]
    word = "pretrain_" if last.startswith("scripts/pretrain_") else last.rpartition(".")[2] if "/" not in last else last
    assert Path(word).stem in text(ROOT / test)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("hetero plan --cluster c.yaml --model m.yaml --global-batch-size 8 ...", None),
        ("hetero plan --cluster c.yaml --model m.yaml", "--global-batch-size is missing"),
        ("hetero plan --clutser c.yaml --model m.yaml --global-batch-size 8", "did you mean '--cluster'"),
        ("hetero launch plan.json --run -- --lr 1e-4 --train-itres 9", "unknown flag --train-itres"),
        ("torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers many ...", "--num-layers"),
        ("torchrun --nproc-per-nodes 2 pretrain_gpt.py ...", "nproc-per-nodes"),
        ("python tools/convert_checkpoint.py --from hf --to hetero --input a", "--output"),
        ("python -m tests.faults.matrix --store-in-rank-1", "has no --store-in-rank-1"),
        ("srun --nodes=2 hetero discover --out", "--out"),
        ("CLUSTER=c.yaml DRYRUN=1 bash scripts/pretrain_llama3_8b.sh", "does not read DRYRUN"),
        ("bash scripts/pretrain_llama9_8b.sh", "there is no"),
        ("pytest tests/test_docs.py::test_nothing", "has no test_nothing"),
        ("pip install '.[trian]'", "has no extra trian"),
        ("frobnicate plan.json", "nobody knows frobnicate"),
    ],
)
def test_wrong_commands_are_noticed(line: str, problem: str | None) -> None:
    (command,) = commands_in(line, "a page")
    found = problem_of(command)
    assert found is None if problem is None else problem in str(found)
