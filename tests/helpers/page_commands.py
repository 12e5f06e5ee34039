"""The commands that stand in the pages, and what is wrong with one: each is read by the parser of its own program."""

import ast
import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch.distributed.run import get_args_parser

from hetero.command_line import UsageError
from megatron.pretrain.cli.parser import read_flags
from tests.helpers.reference_tables import hetero_parser
from tests.helpers.sources import ROOT, name, text
from tools import convert_checkpoint, preprocess_data, race_plans, verify_plan

NOT_OURS = {
    "cat": "writes a file that the page shows",
    "cd": "of the shell",
    "cp": "of the shell",
    "mkdir": "of the shell",
    "do": "of the shell; what follows is another project's",
    "done": "of the shell",
    "etcdctl": "etcd's own",
    "export": "of the shell",
    "for": "of the shell",
    "git": "the network",
    "ip": "the host's own",
    "lint-imports": "scripts/test.sh runs it",
    "mypy": "scripts/test.sh runs it",
    "py-spy": "another project's, for a hanging run",
    "python3": "makes the environment",
    "read": "of the shell",
    "ruff": "scripts/test.sh runs it",
    "source": "of the shell",
}
"""Programs of which nothing is checked, each with the reason."""

TOOLS_WITH_THEIR_OWN_FLAGS = {
    "tools/convert_checkpoint.py": convert_checkpoint._parser,
    "tools/preprocess_data.py": preprocess_data._parser,
}
TOOLS_WITH_FLAGS_OF_TRAINING = {"tools/race_plans.py": race_plans._parser, "tools/verify_plan.py": verify_plan._parser}

RUN_BY = {
    "hetero completion": "tests/unit/test_outputs.py",
    "hetero devices": "tests/unit/test_cli.py",
    "hetero discover": "tests/e2e/test_discover_command.py",
    "hetero doctor": "tests/e2e/test_doctor_command.py",
    "hetero elastic agent": "tests/elastic/test_commands.py",
    "hetero elastic forget": "tests/elastic/test_commands.py",
    "hetero elastic leave": "tests/elastic/test_commands.py",
    "hetero elastic report": "tests/elastic/test_commands.py",
    "hetero elastic run": "tests/elastic/test_commands.py",
    "hetero elastic status": "tests/elastic/test_commands.py",
    "hetero elastic store": "tests/elastic/test_commands.py",
    "hetero launch": "tests/unit/launch/test_command.py",
    "hetero plan": "tests/e2e/test_without_torch.py",
    "hetero profile host": "tests/e2e/test_profile_host.py",
    "hetero profile run": "tests/e2e/test_profile_run.py",
    "hetero show": "tests/unit/test_cli.py",
    "hetero simulate": "tests/e2e/test_without_torch.py",
    "hetero sweep": "tests/e2e/test_sweep.py",
    "hetero validate": "tests/unit/test_cli.py",
    "examples/plan_a_cluster.py": "tests/e2e/test_examples.py",
    "examples/simulate_and_draw.py": "tests/e2e/test_examples.py",
    "examples/train_two_stages.py": "tests/e2e/test_examples.py",
    "pretrain_gpt.py": "tests/e2e/test_pretrain.py",
    "scripts/quickstart.sh": "tests/e2e/test_quickstart.py",
    "scripts/slurm/discover_and_pretrain.sbatch": "tests/e2e/test_slurm_jobs.py",
    "scripts/slurm/pretrain.sbatch": "tests/e2e/test_slurm_jobs.py",
    "scripts/test_gpu.sh": "tests/e2e/test_gpu_script.py",
    "tests.faults.elastic_campaign": "tests/faults/test_elastic_campaign.py",
    "tests.helpers.elastic_simulation": "tests/unit/elastic/test_protocol_exploration.py",
    "tests.helpers.protocol_explorer": "tests/unit/elastic/test_protocol_exploration.py",
    "tests.helpers.publishing_stories": "tests/unit/elastic/test_publishing_exploration.py",
    "tests.stacks.bits": "tests/stacks/test_bits.py",
    "tools/convert_checkpoint.py": "tests/dist/test_huggingface_training.py",
    "tools/plan_flags.py": "tests/e2e/test_pretrain_scripts.py",
    "tools/preprocess_data.py": "tests/unit/tools/test_preprocess_data.py",
    "tools/race_plans.py": "tests/e2e/test_emulation.py",
    "tools/sweep.py": "tests/e2e/test_sweep.py",
    "tools/verify_plan.py": "tests/e2e/test_verify_plan.py",
    **{f"scripts/{path.name}": "tests/e2e/test_pretrain_scripts.py" for path in ROOT.glob("scripts/pretrain_*.sh")},
}
"""For each program that a page names, a test that runs it; what a page says of it is read by its parser besides."""

NOT_RUN = {
    "job.sbatch": "hetero launch wrote it; tests/e2e/test_slurm_jobs.py submits such a file",
    "pip": "the network; scripts/test.sh installs by it",
    "pytest": "the suite itself",
    "scripts/test.sh": "the suite itself",
    "tests.bench.bench_unequal_cpus": "times what tests/e2e/test_unequal_cpus.py runs; for a quiet machine",
    "tests.faults.matrix": "takes an hour; tests/faults/test_faults.py runs its cases in turn",
    "tests.stacks": "makes environments from the network; tests/stacks/test_results.py runs what it is made of",
}
"""Those that no test runs, each with the reason."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page.

    words: as a shell cuts it, without what stands for something of the reader's own.
    elided: something was left out: "...", "<the flags of the run>".
    """

    page: str
    words: tuple[str, ...]
    elided: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands_of(page: Path) -> Iterator[Command]:
    """All commands in the shell blocks of a page, in order."""
    for block in re.findall(r"^```bash\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL):
        yield from commands_in(block, name(page))


def commands_in(block: str, page: str) -> Iterator[Command]:
    """All commands of some shell text."""
    without_files = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
    marked = re.sub(r"<[a-z][^<>\n]*>", "...", without_files.replace("\\\n", " "))
    for line in marked.splitlines():
        # Of what another command says, nothing is known.
        lexer = shlex.shlex(re.sub(r"\$\(.*\)", "SAID", line), posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        tokens = iter([*lexer, ";"])
        for word in tokens:
            if word in (">", ">>"):
                # The shell's: the command does not see the file.
                next(tokens)
                continue
            if not re.fullmatch(r"[&|;]+", word):
                words.append(word)
                continue
            if words:
                left = tuple(each for each in words if each not in ("...", "FLAGS"))
                yield Command(page, left, elided=len(left) < len(words))
            words = []


def problem_of(command: Command) -> str | None:
    """What is wrong with a command, ``None`` for nothing."""
    words, variables = list(command.words), []
    while words and re.match(r"\w+=", words[0]):
        variables.append(words.pop(0).partition("=")[0])
    if not words or words[0] in NOT_OURS:
        return None
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program not in _PROGRAMS:
        return f"nobody knows {program}"
    return _PROGRAMS[program](arguments, variables, command.elided)


def program_of(command: Command) -> str | None:
    """What runs in the end, as the tables above name it; ``None`` for what is not ours."""
    words = [word for word in command.words if not re.match(r"\w+=", word)]
    if not words or words[0] in NOT_OURS:
        return None
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program in ("srun", "sbatch", "bash"):
        rest = _without_options(rest)
        return program_of(Command(command.page, tuple(rest), command.elided)) if program == "srun" else rest[0]
    if program in ("python", "torchrun"):
        if "-m" not in rest:
            return next(word for word in rest if word.endswith(".py"))
        module, *rest = rest[rest.index("-m") + 1 :]
        program = module
    if program == "hetero":
        return " ".join(["hetero", *rest[: 2 if rest[0] in ("profile", "elastic") else 1]])
    return program


def _without_options(words: Sequence[str]) -> list[str]:
    """From the first word on that is no option. Those of srun and sbatch have their values in the same word here."""
    return list(itertools.dropwhile(lambda word: word.startswith("-"), words))


def _hetero(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    problem, found = _parsed(hetero_parser(), arguments)
    if problem:
        return problem
    flags = getattr(found, "flags", None)
    return _flags_of_training(flags) if flags else None


def _parsed(parser: object, arguments: Sequence[str], *, known: bool = False) -> tuple[str | None, object]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if known:
                return None, parser.parse_known_args(list(arguments))[1]  # type: ignore[attr-defined]
            return None, parser.parse_args(list(arguments))  # type: ignore[attr-defined]
    except UsageError as error:
        return str(error), None
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1], None


def _flags_of_training(words: Sequence[str]) -> str | None:
    """Names and values, for what goes together is not known where flags are left out."""
    _, problems = read_flags(words)
    return "; ".join(problems) or None


def _torchrun(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    problem, found = _parsed(get_args_parser(), arguments)
    if problem:
        return problem
    script, rest = found.training_script, found.training_script_args  # type: ignore[attr-defined]
    return _python(["-m", script, *rest] if found.module else [script, *rest], variables, elided)  # type: ignore[attr-defined]


def _python(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    if arguments[0] == "-m":
        return _module(arguments[1], arguments[2:], variables, elided)
    script, rest = arguments[0], arguments[1:]
    if not (ROOT / script).is_file():
        return f"there is no {script}"
    if script in TOOLS_WITH_THEIR_OWN_FLAGS:
        return _parsed(TOOLS_WITH_THEIR_OWN_FLAGS[script](), rest)[0]
    if script in TOOLS_WITH_FLAGS_OF_TRAINING:
        problem, flags = _parsed(TOOLS_WITH_FLAGS_OF_TRAINING[script](), rest, known=True)
        assert isinstance(flags, list | None)
        return problem or _flags_of_training(flags or [])
    if script == "tools/sweep.py":
        return _hetero(["sweep", *rest], variables, elided)
    if script in ("pretrain_gpt.py", "tools/plan_flags.py"):
        return _flags_of_training(rest)
    return _words_stand_in(script, [word for word in rest if word.startswith("-")])


def _module(module: str, arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    if module == "hetero":
        return _hetero(arguments, variables, elided)
    if module == "pytest":
        return _pytest(arguments, variables, elided)
    if module == "torch.distributed.run":
        return _torchrun(arguments, variables, elided)
    places = [Path(*module.split(".")).with_suffix(".py"), Path(*module.split("."), "__main__.py")]
    found = next((place for place in places if (ROOT / place).is_file()), None)
    if found is None:
        return f"there is no module {module}"
    return _words_stand_in(str(found), [word for word in arguments if word.startswith("-")])


def _words_stand_in(script: str, words: Sequence[str]) -> str | None:
    """Scripts that make their parser where they use it: a flag of theirs stands in their text."""
    source = text(ROOT / script)
    missing = [word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", source)]
    return f"{script} has no {' '.join(missing)}" if missing else None


def _bash(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    script, rest = arguments[0], arguments[1:]
    if not (ROOT / script).is_file():
        return f"there is no {script}"
    known = text(ROOT / script) + text(ROOT / "scripts/pretraining.sh")
    if strange := [variable for variable in variables if not re.search(rf"\b{variable}\b", known)]:
        return f"{script} does not read {' '.join(strange)}"
    if re.search(r"/pretrain_\w+\.sh$", script):
        return _flags_of_training(rest)
    return _words_stand_in(script, [word for word in rest if word.startswith("-")])


def _srun(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    return problem_of(Command("", tuple(_without_options(arguments)), elided))


def _sbatch(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    script, *rest = _without_options(arguments)
    if script.startswith("scripts/"):
        if not (ROOT / script).is_file():
            return f"there is no {script}"
        if "discover" in script:
            return _bash(rest, (), elided)
        return _flags_of_training(rest[1:])
    return None


def _pytest(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    for word in arguments:
        path, _, test = word.partition("::")
        if not path.startswith("tests"):
            continue
        if not (ROOT / path).exists():
            return f"there is no {path}"
        if test and f"def {test.partition('[')[0]}(" not in text(ROOT / path):
            return f"{path} has no {test}"
    return None


@cache
def _extras() -> frozenset[str]:
    """The extras that setup.py has."""
    for node in ast.walk(ast.parse(text(ROOT / "setup.py"))):
        if isinstance(node, ast.keyword) and node.arg == "extras_require" and isinstance(node.value, ast.Dict):
            return frozenset(ast.literal_eval(key) for key in node.value.keys if key is not None)
    raise AssertionError("setup.py has no extras")


def _pip(arguments: Sequence[str], variables: Sequence[str], elided: bool) -> str | None:
    for word in arguments:
        found = re.fullmatch(r"(?:\.|megatron-hetero)\[([^\]]*)\].*", word)
        if found and (strange := set(found[1].split(",")) - _extras()):
            return f"setup.py has no extra {', '.join(sorted(strange))}"
    return None


_PROGRAMS: dict[str, Callable[[Sequence[str], Sequence[str], bool], str | None]] = {
    "bash": _bash,
    "hetero": _hetero,
    "pip": _pip,
    "pytest": _pytest,
    "python": _python,
    "sbatch": _sbatch,
    "srun": _srun,
    "torchrun": _torchrun,
}


def blocks_that_run(page: Path) -> list[str]:
    """The shell blocks of a page that some test runs as they are."""
    return re.findall(r"^<!-- runs in CI -->\n```bash\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)
