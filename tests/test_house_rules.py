"""Rules that no linter has."""

import ast
import fnmatch
import hashlib
import importlib.metadata
import re
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import module_map
from tests.helpers.generated_parts import written
from tests.helpers.sources import ROOT, SOURCES, TESTS, name, text, with_words

BELOW_THE_ENTRY_POINTS = [path for path in SOURCES if path.is_relative_to(ROOT / "hetero") and path.name != "cli.py"]

READS_ENVIRONMENT = frozenset(
    {
        "hetero/elastic/warm_ranks.py",  # where a process becomes a rank, as under a launcher
        "hetero/distributed/closed_listeners.py",  # whether torch's gloo, which reads it there, connects later
        "hetero/distributed/launch_store.py",  # the launcher's variables, as torch's own env:// rendezvous reads them
        "hetero/distributed/world.py",  # sets what gloo and NCCL read there when the world is made
        "hetero/discovery/__main__.py",  # an entry point: it is a rank of whatever has launched it
        "hetero/commands/launch.py",  # an entry point: Slurm says in it which allocation it runs in
        "hetero/doctor/__main__.py",  # an entry point: it tells what its host and its launcher say
        "hetero/emulation/__main__.py",  # an entry point: it hides the GPUs of its host
        "hetero/launch/slurm_task.py",  # an entry point: it is a task of the step that a launch has started
        "hetero/profiling/run.py",  # an entry point: it is a rank of whatever has launched it
        "hetero/spec/hugging_face/folder.py",  # where Hugging Face's own libraries keep their cache
    }
)
"""Modules of ``hetero`` that may read environment variables, each with the reason beside it."""

READS_BY_ITSELF = frozenset(
    {
        "hetero/serialization.py",  # the one place
        "hetero/data/__init__.py",  # resources of the package
        "hetero/doctor/installed_files.py",  # what pip wrote
    }
)
"""Modules that may read text, JSON, YAML or pickles without its help, each with the reason beside it."""


READS_WHAT_COULD_RUN = {
    "hetero/checkpoint/folder.py": "ctypes.CDLL: the C library of this process",
    "hetero/checkpoint/interchange/metadata_pickle.py": "pickle: an unpickler of a few instructions and record types",
    "hetero/checkpoint/interchange/torch_dist.py": "pickle, torch.load: an error of theirs; tensors with weights_only",
    "hetero/cli.py": "importlib.import_module: modules of the table of commands",
    "hetero/distributed/cudnn_library.py": "ctypes.CDLL: libraries in the folder of an installed package",
    "hetero/distributed/helper_processes.py": "ctypes.CDLL: the C library of this process",
    "hetero/distributed/nccl_library.py": "ctypes.CDLL: the library that torch has loaded",
    "hetero/doctor/host_facts.py": "ctypes.CDLL: the driver's library, by the system's search path",
    "hetero/elastic/fork_server.py": "importlib.import_module: one module of this package",
    "hetero/elastic/warm_ranks.py": "runpy.run_path: the program that the user launched",
    "hetero/runtime/version_differences.py": "importlib.import_module, SourceFileLoader: installed packages",
    "tools/preprocess_data.py": "importlib.import_module: one module of megatron-core",
}
"""Modules with a reader of code, or of data that can hold code, and what each reads with it.

Never a name or a file that data gave, but what the user launched or installed.
"""

COULD_RUN = re.compile(
    r"(pickle|marshal|shelve|dill|cloudpickle|joblib|multiprocessing\.managers|torch\.package)(\..*)?"
    r"|(torch|torch\.jit|np|numpy)\.load|torch\.hub\..*|importlib\.(import_module|machinery\.SourceFileLoader|reload)"
    r"|importlib\.util\.spec_from_file_location|runpy\..*|ctypes\.(CDLL|PyDLL|cdll)|multiprocessing\.connection\."
    r"(Listener|Client)|SourceFileLoader|eval|exec|compile|__import__|yaml\.(unsafe_|full_)?load(_all)?"
)
"""Names of what reads code, or data that can hold code."""


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(text(path), filename=str(path)))


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest skips some names, "dist" among them, unless told otherwise, and says nothing."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {parent for path in TESTS for parent in path.relative_to(ROOT).parents if parent.name}
    assert Path("tests/dist") in folders
    assert [folder for folder in folders if any(fnmatch.fnmatch(folder.name, pattern) for pattern in skipped)] == []


def test_modules_are_short() -> None:
    lengths = {name(path): len(text(path).splitlines()) for path in SOURCES}
    assert {module: length for module, length in lengths.items() if length > 500} == {}


def test_no_star_imports() -> None:
    stars = [
        f"{name(path)}: {node.module}"
        for path in with_words(SOURCES + TESTS, "*")
        if re.search(r"\bimport\s*\(?\s*\*", text(path))
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert stars == []


def test_no_percentage_is_negative_zero() -> None:
    """What rounding leaves below 0 is printed as ``-0.0%`` but for the ``z`` (PEP 682)."""
    without = [
        f"{name(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FormattedValue)
        and isinstance(node.format_spec, ast.JoinedStr)
        and (spec := ast.unparse(node.format_spec)).rstrip("'\"").endswith("%")
        and "z" not in spec
    ]
    assert without == []


def test_no_module_is_called_utils() -> None:
    """Such a name says nothing, so everything ends up there."""
    assert [name(path) for path in SOURCES + TESTS if path.stem.strip("_") in ("util", "utils")] == []


def public_types(path: Path) -> Iterator[str]:
    """Public classes of a module, and its type aliases: what is given a name like ``RankTuple`` and is no call."""
    for node in ast.parse(text(path), filename=str(path)).body:
        if isinstance(node, ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            found = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            found = []
        yield from (each for each in found if re.fullmatch(r"[A-Z]\w*[a-z]\w*", each))


def test_no_two_types_share_a_name() -> None:
    """Who reads a name, or searches for it, finds one thing."""
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for each in public_types(path):
            homes.setdefault(each, []).append(name(path))
    assert {each: where for each, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class Span:\n    class Inner: ...", ["Span"]),
        ("class _Span: ...", []),
        ("Ranks = tuple[int, ...]", ["Ranks"]),
        ("Choice = Literal['a', 'b']", ["Choice"]),
        ("T = TypeVar('T')\nLIMIT = 3\nother = int", []),
    ],
)
def test_public_types_are_found(tmp_path: Path, code: str, found: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert list(public_types(path)) == found


def test_what_mypy_is_to_overlook_has_a_reason() -> None:
    """After the code of the error, which ruff asks for, stands why it is none."""
    ignores = [(name(path), line) for path in SOURCES for line in text(path).splitlines() if "# type: ignore" in line]
    assert [(path, line) for path, line in ignores if not re.search(r"ignore\[[\w, -]+\]  # \w", line)] == []


ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")


def environment_reads(path: Path) -> list[int]:
    """Lines that name the environment of the process."""
    return [
        node.lineno
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in ENVIRONMENT for a in node.names))
    ]


def test_only_entry_points_read_the_environment() -> None:
    reads = {name(path): environment_reads(path) for path in with_words(BELOW_THE_ENTRY_POINTS, *ENVIRONMENT)}
    assert {path: lines for path, lines in reads.items() if lines and path not in READS_ENVIRONMENT} == {}, (
        "take the value as an argument"
    )


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\nx = os.getenv('A')", [2]),
        ("from os import environ", [1]),
        ("import os\nos.getcwd()", []),
    ],
)
def test_environment_reads_are_found(tmp_path: Path, code: str, lines: list[int]) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert environment_reads(path) == lines


def own_reads(path: Path) -> list[str]:
    """Where a module reads text, JSON, YAML or a pickle by itself."""
    readers = {"json": {"load", "loads", "JSONDecoder"}, "pickle": {"load", "loads"}}
    found = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "yaml", "pickle"):
            found.append(f"line {node.lineno}: from {node.module} import")
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: import yaml" for alias in node.names if alias.name == "yaml"]
        if isinstance(node, ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in readers.get(of, ()) or node.attr in ("read_text", "read_bytes"):
                found.append(f"line {node.lineno}: {of}.{node.attr}")
    return found


def test_one_module_reads_files_of_users() -> None:
    """It limits what a file may cost: size, depth, digits, aliases, and what is no regular file."""
    paths = with_words(SOURCES, "json", "yaml", "pickle", "read_text", "read_bytes")
    reads = {name(path): own_reads(path) for path in paths}
    assert {path: lines for path, lines in reads.items() if lines and path not in READS_BY_ITSELF} == {}, (
        "take read_text, read_bytes, parse_json or load of hetero.serialization"
    )


@pytest.mark.parametrize(
    ("code", "num_reads"),
    [
        ("import json\njson.loads('1')", 1),
        ("import json\njson.dumps(1)", 0),
        ("from json import loads", 1),
        ("import yaml", 1),
        ("from pathlib import Path\nPath('a').read_text()", 1),
        ("path.parent.read_bytes()", 1),
        ("import pickle\npickle.load(file)", 1),
    ],
)
def test_own_reads_are_found(tmp_path: Path, code: str, num_reads: int) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert len(own_reads(path)) == num_reads


MAKES_CONSOLES = "hetero/console.py"


def made_consoles(path: Path) -> list[int]:
    """The lines where a module makes a console of Rich by itself, or hands it a text whose markup counts."""
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if (isinstance(call.func, ast.Name) and call.func.id == "Console")
        or (isinstance(call.func, ast.Attribute) and call.func.attr in ("Console", "from_markup"))
        or (
            isinstance(call.func, ast.Name)
            and call.func.id == "TextColumn"
            and "{" in ast.unparse(call.args[0])
            and not any(word.arg == "markup" and ast.unparse(word.value) == "False" for word in call.keywords)
        )
    ]


def test_consoles_are_made_in_one_place() -> None:
    """Another one takes words in brackets for styles, and lets the escape sequences of names through."""
    made = {name(path): made_consoles(path) for path in with_words(SOURCES, "Console", "from_markup", "TextColumn")}
    assert {path: lines for path, lines in made.items() if lines and path != MAKES_CONSOLES} == {}, (
        "take console of hetero.console"
    )


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("from rich.console import Console\nConsole(stderr=True)", [2]),
        ("import rich.console\nrich.console.Console()", [2]),
        ("from rich.text import Text\nText.from_markup(name)", [2]),
        ("TextColumn('{task.description}')", [1]),
        ("TextColumn('{task.description}', markup=False)", []),
        ("TextColumn('step')", []),
        ("from rich.console import Console\ndef show(console: Console) -> None: ...", []),
    ],
)
def test_own_consoles_are_found(tmp_path: Path, code: str, lines: list[int]) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert made_consoles(path) == lines


def code_readers(path: Path) -> list[str]:
    """Where a module imports or calls a reader of what could run."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
        else:
            continue
        found += [f"line {node.lineno}: {each}" for each in names if COULD_RUN.fullmatch(each)]
    return found


def test_no_data_can_run() -> None:
    """Files and texts of others are read by formats that hold numbers and text alone."""
    readers = {name(path): found for path in SOURCES if (found := code_readers(path))}
    assert {path: found for path, found in readers.items() if path not in READS_WHAT_COULD_RUN} == {}, (
        "read another format, or say in READS_WHAT_COULD_RUN what it reads"
    )
    assert readers.keys() == READS_WHAT_COULD_RUN.keys()


def test_one_module_imports_the_datasets_of_megatron_core() -> None:
    """There they get a numpy that reads no pickles."""
    paths = with_words(SOURCES, "megatron.core.datasets")
    importers = {
        name(path) for path in paths for module in imports_of(path) if module.startswith("megatron.core.datasets")
    }
    assert importers == {"megatron/pretrain/core_datasets.py"}


@pytest.mark.parametrize(
    ("code", "num_readers"),
    [
        ("import pickle", 1),
        ("from pickle import loads", 1),
        ("from multiprocessing.connection import Listener", 1),
        ("from multiprocessing.connection import Connection", 0),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", 1),
        ("import torch\ntorch.load(path)", 1),
        ("import torch\ntorch.jit.load(path)", 1),
        ("import importlib.metadata", 0),
        ("import importlib\nimportlib.import_module(name)", 1),
        ("eval(text)\nexec(text)", 2),
        ("model.eval()\npattern.compile()", 0),
    ],
)
def test_code_readers_are_found(tmp_path: Path, code: str, num_readers: int) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert len(code_readers(path)) == num_readers


def imports_of(path: Path) -> dict[str, set[str]]:
    """By module, the names that ``path`` imports from it."""
    found: dict[str, set[str]] = {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def test_one_lowering() -> None:
    """Rows are made from a plan in one place; others know the names of the orders at most."""
    makers = [
        name(path)
        for path in with_words(SOURCES, "schedule")
        if "hetero.schedule.passes" in imports_of(path)
        or imports_of(path).get("hetero.schedule.orders", set()) - {"ORDERS", "BY_DEPTHS"}
    ]
    assert makers == ["hetero/plan/lowering.py"]


def test_one_geometry_of_boundaries() -> None:
    """Who sends whom which rows and samples is worked out in one place, of which everybody takes the messages."""
    cutters = [
        name(path)
        for path in with_words(SOURCES, "transfers", "num_phases")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and node.name in ("transfers", "num_phases")
    ]
    assert cutters == ["hetero/plan/reshard.py"] * 2
    cut = {"transfers", "transfers_by_phase"}
    callers = with_words(SOURCES, *cut)
    takers = {name(path) for path in callers if cut & set(imports_of(path).get("hetero.plan.reshard", ()))}
    assert {
        "hetero/distributed/p2p.py",
        "hetero/cost/simulation/lanes.py",
        "hetero/emulation/cluster/link_model.py",
    } <= takers


def test_the_architecture_page_has_every_module() -> None:
    assert written(module_map.PAGE, module_map.BEGIN) == module_map.module_map(), (
        "run python -m tests.helpers.module_map"
    )


def layers_of(contract: str) -> list[str]:
    """The layers of one of lint-imports' contracts, in ``pyproject.toml``."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    (layers,) = (each["layers"] for each in tools["importlinter"]["contracts"] if each["name"] == contract)
    return list(layers)


@pytest.mark.parametrize("contract", ["Data flows one way", "The planner's steps go down one list"])
def test_the_architecture_page_has_the_list_of_imports(contract: str) -> None:
    """As the linter checks it, with a word on some lines; the planner's without the package that all are in."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    blocks = [
        [re.split(r" {2,}", line)[0] for line in block.strip().splitlines()]
        for block in re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ]
    layers = layers_of(contract)
    assert layers in blocks or [layer.replace("hetero.", "") for layer in layers] in blocks


def test_a_commit_is_held_to_what_the_tests_begin_with() -> None:
    """The hooks of pre-commit are the commands of ``scripts/test.sh`` before its tests."""

    def commands(file: str) -> set[str]:
        """Without their flags and files."""
        text = (ROOT / file).read_text(encoding="utf-8")
        return {
            found.strip() for found in re.findall(r"^ *(?:entry: )?\.venv/bin/([a-z -]+?)(?: [-.].*)?$", text, re.M)
        }

    assert commands(".pre-commit-config.yaml") == commands("scripts/test.sh")
    assert {"ruff check", "mypy"} <= commands("scripts/test.sh")


def test_megatron_stays_a_namespace_package() -> None:
    """An ``__init__.py`` here would hide the installed ``megatron.core``."""
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert not (ROOT / "megatron" / "core").exists()


def test_megatron_core_is_unmodified() -> None:
    """Every installed source file still has the hash that its wheel recorded."""
    recorded = [
        file
        for file in importlib.metadata.files("megatron-core") or []
        if file.hash is not None and file.suffix == ".py"
    ]
    assert len(recorded) > 100
    changed = []
    for file in recorded:
        assert file.hash is not None
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
        if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
    assert changed == []


def test_one_training_loop() -> None:
    """Whoever trains does it by ``TrainingSession``: nobody else calls the two halves of a step."""
    steps = {"step", "compute_gradients", "update"}
    callers = {
        name(path)
        for path in with_words(SOURCES, "trainer")
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in steps
        and ast.unparse(node.func.value).endswith("trainer")
    }
    assert callers == {"hetero/runtime/session.py"}


MESSAGES = {"P2POp": 3, "isend": 2, "irecv": 2, "send": 2, "recv": 2}
"""Functions of ``torch.distributed`` for two ranks, and the place at which each takes its group."""


def messages_without_a_group(path: Path) -> list[int]:
    """Lines with a message that goes over the world, whose other ranks NCCL waits for at its first call."""
    return [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
        and len(node.args) <= MESSAGES.get(node.func.attr, -1)
        and "group" not in [keyword.arg for keyword in node.keywords]
    ]


def test_every_message_names_its_group() -> None:
    found = {name(path): messages_without_a_group(path) for path in with_words(SOURCES, *MESSAGES)}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("dist.P2POp(dist.isend, message, 1)", [1]),
        ("dist.P2POp(dist.isend, message, 1, group)", []),
        ("dist.isend(message, dst=1)", [1]),
        ("torch.distributed.recv(message, 1, group=group)", []),
    ],
)
def test_messages_without_a_group_are_found(tmp_path: Path, code: str, lines: list[int]) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert messages_without_a_group(path) == lines


def test_versions_differ_in_one_module() -> None:
    """What depends on a version of megatron-core, torch or Python is where dropping that version deletes it."""
    branches = [
        f"{name(path)}:{node.lineno}"
        for path in SOURCES
        if name(path) != "hetero/runtime/version_differences.py"
        for node in nodes(path)
        if isinstance(node, (ast.Compare, ast.Call))
        and re.search(
            r"sys\.version_info|\.__version__ [<>=!]|is_torch_min_version|is_mcore_min_version", ast.unparse(node)
        )
    ]
    assert branches == []
