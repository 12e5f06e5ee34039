"""What the pages name exists, and the first change that CONTRIBUTING.md describes can be made."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from hetero.cli import main
from hetero.spec import shipped_devices
from hetero.spec.devices import DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.preprocess_flags import IGNORED_PREPROCESS_FLAGS, REFUSED_PREPROCESS_FLAGS
from megatron.pretrain.cli.unsupported import UNSUPPORTED_FLAGS
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT
from tests.helpers import flag_table, generated_parts
from tests.helpers.data_sheets import check_data_sheet
from tests.helpers.sources import ROOT, name, with_words

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SOURCE_FOLDERS = ("hetero", "megatron", "tools", "scripts", "tests")

NOT_HERE = frozenset(
    {
        "attention/dot_product_attention/utils.py",  # of TransformerEngine
        "megatron/core",  # of megatron-core's wheel
        "megatron/core/tensor_parallel/layers.py",  # as well
        "megatron/training",  # of megatron-core's wheel since 0.17, and of this project before
        "tests/golden/gpipe_recompute_last.txt",  # what the worked example would add
        "torch/numa/binding.py",  # of torch's wheel
    }
)
"""Paths that a page names and that are not to exist, each with the reason beside it."""

FOREIGN_FLAGS = frozenset(
    {
        "--auto-compaction-mode",  # of etcd
        "--export",  # of sbatch
        "--force-reinstall",  # of pip
        "--auto-compaction-retention",  # of etcd
        "--capture-range",  # of nsys
        "--check",  # of sha256sum
        "--duration",  # of py-spy
        "--election-timeout",  # of etcd
        "--gpus-per-node",  # of sbatch
        "--het-group",  # of srun
        "--exclusive",  # of sbatch
        "--gpus",  # of sbatch and srun
        "--hetero",  # the beginning of a name
        "--index-url",  # of pip
        "--ipc",  # of docker
        "--master-addr",  # of torchrun
        "--master-port",  # of torchrun
        "--nnodes",  # of torchrun
        "--no-build-isolation",  # of pip
        "--no-deps",  # of pip
        "--node-rank",  # of torchrun
        "--nproc-per-node",  # of torchrun
        "--nodes",  # of sbatch
        "--cpu-bind",  # of srun
        "--cpus-per-task",  # of srun
        "--distribution",  # of srun
        "--exact",  # of srun
        "--no-kill",  # of sbatch
        "--nodelist",  # of srun
        "--ntasks",  # of srun
        "--overlap",  # of srun
        "--ntasks-per-node",  # of srun
        "--numa-binding",  # of torchrun
        "--pid",  # of py-spy
        "--pty",  # of srun
        "--time",  # of sbatch
        "--quota-backend-bytes",  # of etcd
        "--data-dir",  # of etcdctl
        "--rdzv-backend",  # of torchrun
        "--rdzv-conf",  # of torchrun
        "--rdzv-endpoint",  # of torchrun
        "--requeue",  # of sbatch
        "--shm-size",  # of docker
        "--signal",  # of sbatch
        "--standalone",  # of torchrun
        "--strict",  # of mkdocs
        "--threads",  # of nvcc
        "--ulimit",  # of docker
    }
)
"""Flags that a page names and that are other programs', each with its program beside it."""


def links(page: Path) -> Iterator[str]:
    """Files that the page links to, and the headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"\w+://|mailto:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in links(page) if not is_there(page, target)] == []


def is_there(page: Path, target: str) -> bool:
    file, _, heading = target.partition("#")
    path = page.parent / file if file else page
    return path.exists() and (not heading or heading in headings(path))


@cache
def headings(path: Path) -> frozenset[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def paths_named(page: Path) -> set[str]:
    """Paths in the page's text, from the top of the repository or below ``hetero``."""
    text = page.read_text(encoding="utf-8")
    whole = re.findall(r"(?<![\w/.~<-])((?:hetero|megatron|scripts|tools|tests|examples|docs)/[\w./-]*\w)", text)
    short = re.findall(r"`([a-z_]+/[\w/]+\.py)`", text)
    return {*whole, *short} - NOT_HERE


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path) -> None:
    missing = [
        path for path in paths_named(page) if not (ROOT / path).exists() and not (ROOT / "hetero" / path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("begin", flag_table.TABLES)
def test_the_tables_of_flags_are_those_of_the_code(begin: str) -> None:
    assert generated_parts.written(flag_table.PAGE, begin) == flag_table.TABLES[begin](), (
        "run python -m tests.helpers.flag_table"
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_exist(page: Path) -> None:
    """Dotted names, of a module or of what one defines."""
    dotted = re.findall(r"(?<![\w/.])((?:hetero|tests)(?:\.[a-zA-Z_]\w*)+)", page.read_text(encoding="utf-8"))
    assert [each for each in dotted if not is_defined(each)] == []


def is_defined(dotted: str) -> bool:
    *parents, last = dotted.split(".")
    folder = ROOT.joinpath(*parents)
    if (folder / last).is_dir() or (folder / last).with_suffix(".py").exists():
        return True
    source = folder.with_suffix(".py") if folder.with_suffix(".py").exists() else folder / "__init__.py"
    return source.exists() and re.search(rf"\b{last}\b", source.read_text(encoding="utf-8")) is not None


@cache
def known_flags() -> frozenset[str]:
    """Those of training, supported or not, and those that the sources and scripts declare: a text that is one flag."""
    known = {name for flag in FLAGS for name in flag.names} | FOREIGN_FLAGS
    for table in (UNSUPPORTED_FLAGS, WITHOUT_EFFECT, REFUSED_PREPROCESS_FLAGS, IGNORED_PREPROCESS_FLAGS):
        known.update(table)
    paths = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for path in with_words((path for path in paths if not path.name.startswith("test_")), '"--', "'--"):
        texts = (node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_text(node))
        known.update(text for text in texts if re.fullmatch(r"--[a-z][\w-]*", text))
    for path in (ROOT / "scripts").rglob("*.sh"):
        known.update(re.findall(r"^ *(--[a-z][\w-]*)\)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset(known)


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w-])--[a-z][\w-]*\w", page.read_text(encoding="utf-8"))
    known = known_flags()
    assert [flag for flag in named if known.isdisjoint({flag, flag.replace("--no-", "--", 1)})] == []


@pytest.mark.parametrize(
    ("flag", "exists"),
    [
        ("--lr", True),
        ("--hetero-plan", True),
        ("--delay-wgrad-compute", True),
        ("--time-limit", True),
        ("--only", True),
        ("--fast", True),
        ("--check", True),
        ("--buckets", False),
        ("--segments", False),
        ("--share", False),
        ("--heartbeat-timeout", False),
    ],
)
def test_flags_are_looked_up(flag: str, exists: bool) -> None:
    """A word of the sources is no flag for that."""
    assert (flag in known_flags()) is exists


def surfaces() -> list[list[str]]:
    """The cells of each row of the table of surfaces."""
    _, _, rest = (ROOT / "docs/security.md").read_text(encoding="utf-8").partition("| surface |")
    return [row.strip("| ").split(" | ") for row in rest.splitlines()[2:] if row.startswith("| ")]


def test_the_table_of_surfaces_is_read() -> None:
    assert len(surfaces()) > 20
    assert {len(row) for row in surfaces()} == {4}


@pytest.mark.parametrize("row", surfaces(), ids=lambda row: row[0])
def test_a_test_holds_each_surface(row: list[str]) -> None:
    """The last cell names tests as pytest does, and each of them is there."""
    named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", row[-1])
    assert named
    missing = [
        f"{path}::{each}"
        for path, names in named
        for each in names.split("::")[1:]
        if not re.search(rf"(?:def|class) {each}\b", (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert missing == []


@pytest.fixture
def first_change() -> str:
    """The section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## A first change\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert isinstance(section, str)
    return section


@pytest.fixture
def new_device(first_change: str, monkeypatch: pytest.MonkeyPatch) -> DeviceType:
    """The one of the page. Where somebody is just following it, the catalogue is as it was before."""
    (code,) = re.findall(r"^    (_gpu\(.*\)),$", first_change, re.MULTILINE)
    made = eval(code, vars(shipped_devices))
    assert isinstance(made, DeviceType)
    shipped = SHIPPED_DEVICES._devices
    assert shipped.get(made.name, made) == made
    monkeypatch.delitem(shipped, made.name, raising=False)
    return made


def test_the_first_change_passes_the_tests_of_every_device(
    first_change: str, new_device: DeviceType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = re.findall(r'^        (\("NVIDIA .*"\)),$', first_change, re.MULTILINE)
    (other,) = re.findall(r'`"(NVIDIA [^"]*)"`', first_change)
    tests = re.findall(r"`(test_\w+)`", first_change)
    assert len(tests) == 2
    file = (ROOT / "tests/unit/spec/test_devices.py").read_text(encoding="utf-8")
    assert [test for test in tests if f"def {test}(" not in file] == []
    cuda_name, device = ast.literal_eval(row)
    assert SHIPPED_DEVICES.called(cuda_name) is None, "the new test fails first"
    monkeypatch.setitem(SHIPPED_DEVICES._devices, new_device.name, new_device)
    found = SHIPPED_DEVICES.called(cuda_name)
    assert found is not None
    assert found.name == device == new_device.name
    assert SHIPPED_DEVICES.called(other) is None
    check_data_sheet(new_device)


@pytest.mark.slow
def test_the_first_change_makes_the_failing_command_work(
    first_change: str,
    new_device: DeviceType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (cluster,) = re.findall(r"<<'END'\n(.*?)END\n", first_change, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(cluster, encoding="utf-8")
    (command,) = re.findall(r"^hetero (plan .*?)\n```", first_change, re.MULTILINE | re.DOTALL)
    (message,) = re.findall(r"^hetero: /tmp/mine.yaml: (.*)$", first_change, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " ").replace("/tmp/mine.yaml", str(tmp_path / "mine.yaml")))
    monkeypatch.chdir(ROOT)

    assert main(words) == 2
    assert capsys.readouterr().err == f"hetero: {tmp_path / 'mine.yaml'}: {message}\n"
    monkeypatch.setitem(SHIPPED_DEVICES._devices, new_device.name, new_device)
    assert main(words) == 0
    assert "this rests on estimates (data sheet)" in capsys.readouterr().out
