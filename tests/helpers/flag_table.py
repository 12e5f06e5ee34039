"""The tables of docs/megatron_flags.md: every flag of Megatron-LM and of its preprocess_data.py, and what it does here.

python -m tests.helpers.flag_table        writes them
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence

from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.fields import Flag
from megatron.pretrain.cli.preprocess_flags import IGNORED_PREPROCESS_FLAGS, REFUSED_PREPROCESS_FLAGS
from megatron.pretrain.cli.unsupported import UNSUPPORTED_FLAGS, values_that_ask_for_nothing
from megatron.pretrain.cli.unsupported_elsewhere import FLAGSCALE, TORCHRUN
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT, WithoutEffect
from tests.helpers.generated_parts import table_row, write
from tests.helpers.megatron_examples import EXAMPLES
from tests.helpers.megatron_parsers import VERSIONS, MegatronFlag, recorded_parser
from tests.helpers.sources import ROOT
from tools import preprocess_data

PAGE = ROOT / "docs/megatron_flags.md"

Row = tuple[str, str, str]

NOT_MEGATRONS = {"--help", "--input-format", "--pattern", "--overwrite", "--skip-bad"}
"""Flags of our preprocess_data.py that Megatron-LM's does not have."""


OTHER_DEFAULTS = {
    "--ddp-bucket-size": "Megatron-LM's grows with the number of replicas, which differs between the stages of a plan",
    "--eval-interval": "the default of older Megatron-LM",
    "--eval-iters": "an evaluation has to be asked for",
    "--profile-ranks": "--profile alone lets rank 0 write a trace; in Megatron-LM all ranks do",
    "--transformer-impl": "layers are local where TransformerEngine's cannot run",
}
"""Flags whose default is not Megatron-LM's, and why."""

SAME_MEANING = {
    "--dataloader-type": "Megatron-LM makes single of none",
    "--distributed-backend": "without it nccl on GPUs; CPUs have gloo alone",
    "--num-virtual-stages-per-pipeline-rank": "a pipeline rank without it has one stage",
    "--recompute-granularity": "none recomputes nothing",
    "--recompute-method": "without --recompute-granularity full it says nothing, and that needs it there",
    "--start-eval-at-iter": "at 0, evaluations start with the run",
    "--split": "Megatron-LM puts the same shares in place of none",
}
"""Flags whose default is written differently here, and why it is the same."""


def flag_table() -> str:
    """Return a line per flag of training, in the order of the names."""
    rows = [*_supported(), *_without_effect(WITHOUT_EFFECT), *_refused(UNSUPPORTED_FLAGS)]
    return _table([(name, *_versions(name.strip("`")), here, text) for name, here, text in rows], "since", "gone in")


def default_table() -> str:
    """Return a line per flag whose default is another one here than in the newest Megatron-LM."""
    theirs = recorded_parser(VERSIONS[-1])
    lines = [
        f"| `{flag.name}` | {_shown(_words(flag.default))} | {_shown(theirs[flag.name].default)} | "
        f"{OTHER_DEFAULTS[flag.name]} |"
        for flag in sorted(FLAGS, key=lambda flag: flag.name)
        if flag.name in OTHER_DEFAULTS
    ]
    return "\n".join(["| flag | default here | of Megatron-LM | why |", "|---|---|---|---|", *lines])


def example_table() -> str:
    """Return a line per example of Megatron-LM, with the messages that its flags get here."""
    lines = ["| example | flags | accepted | to change, as the messages say it |", "|---|---|---|---|"]
    for example in EXAMPLES.values():
        messages = example.messages()
        flags = len(example.names)
        accepted = flags - len({line.split()[0].strip(":") for line in messages})
        source = f"[{example.title}](https://github.com/NVIDIA/Megatron-LM/blob/{example.commit}/{example.path})"
        lines.append(f"| {source} | {flags} | {accepted} | {'<br>'.join(messages)} |")
    return "\n".join(lines)


def preprocess_table() -> str:
    """Return a line per flag of preprocess_data.py, in the order of the names."""
    ignored, refused = IGNORED_PREPROCESS_FLAGS, REFUSED_PREPROCESS_FLAGS
    return _table([*_supported_by_preprocess(), *_without_effect(ignored), *_refused(refused)])


def other_default(flag: Flag) -> bool:
    """Whether the default of a flag is not written as in the newest Megatron-LM."""
    theirs = recorded_parser(VERSIONS[-1]).get(flag.name)
    if theirs is None or flag.is_switch:
        return False
    ours = _words(flag.default)
    return ours != theirs.default and not (_is_number(ours) and float(ours) == float(theirs.default or math.nan))


def refused_choices(flag: Flag) -> list[str]:
    """Return the values that a parser of Megatron-LM has to choose from and ``flag`` does not take."""
    choices = dict.fromkeys(choice for known in _known(flag.name).values() for choice in known.choices)
    return [choice for choice in choices if not _takes(flag, choice)]


TABLES = {
    "<!-- the examples, from the code -->": example_table,
    "<!-- the defaults, from the code -->": default_table,
    "<!-- the table, from the code -->": flag_table,
    "<!-- the table of preprocess_data.py, from the code -->": preprocess_table,
}
"""The lines of the page that the tables follow."""


def _table(rows: Sequence[tuple[str, ...]], *more_columns: str) -> str:
    rows = sorted(rows, key=lambda row: row[0].strip("`").lower())
    counts = {here: sum(row[-2] == here for row in rows) for here in ("supported", "without effect", "refused")}
    total = ", ".join(f"{count} {here}" for here, count in counts.items())
    lines = map(table_row, rows)
    header = f"| {' | '.join(('flag', *more_columns, 'here', ''))} |".replace("|  |", "| |")
    return "\n".join([f"{len(rows)} flags: {total}.", "", header, "|---" * (3 + len(more_columns)) + "|", *lines])


def _known(name: str) -> dict[str, MegatronFlag]:
    """Return what the parsers that have the flag say of it, by the release of megatron-core."""
    return {version: recorded_parser(version)[name] for version in VERSIONS if name in recorded_parser(version)}


def _versions(name: str) -> tuple[str, str]:
    """Return from which megatron-core on Megatron-LM has the flag, and from which on no more."""
    for program, groups in {"torchrun": TORCHRUN, "FlagScale": FLAGSCALE}.items():
        if any(name in flags.split() for _, flags in groups):
            return program, ""
    known = [version in _known(name) for version in VERSIONS]
    minors = [version.rpartition(".")[0] for version in VERSIONS]
    if not any(known):
        return "", f"{minors[0]} or before"
    first = known.index(True)
    last = len(known) - 1 - known[::-1].index(True)
    return minors[first] if first else "", minors[last + 1] if last + 1 < len(minors) else ""


def _words(value: object) -> str:
    """Write a default as the records of parsers do."""
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _shown(default: str) -> str:
    return default or "none"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _takes(flag: Flag, value: str) -> bool:
    try:
        return flag.type is None or flag.type(value) is not None
    except argparse.ArgumentTypeError:
        return False


def _supported() -> Iterator[Row]:
    for flag in FLAGS:
        for name in flag.names:
            if not name.startswith("--hetero-"):
                text = f"{flag.help}{_value(flag)}" if name == flag.name else f"See `{flag.name}`."
                yield f"`{name}`", "supported", text


def _value(flag: Flag) -> str:
    """What the flag takes, and what it is without it."""
    if flag.type is None:
        return ""
    default = "" if flag.default in (None, ()) else f"; without it {flag.default}"
    refused = refused_choices(flag)
    others = f" Refused: {', '.join(refused)}." if refused else ""
    if flag.type.shown.startswith("{"):
        return f" Takes {flag.type.limit}{default}.{others}"
    return f" W{default[3:]}.{others}" if default else others


def _supported_by_preprocess() -> Iterator[Row]:
    for action in preprocess_data._parser()._actions:
        text = (action.help or "").replace("%%", "%")
        for name in action.option_strings:
            if name.startswith("--") and name not in NOT_MEGATRONS:
                yield f"`{name}`", "supported", f"{text[0].upper()}{text[1:]}."


def _without_effect(flags: Mapping[str, WithoutEffect]) -> Iterator[Row]:
    for name, flag in flags.items():
        only = f" Refused without {flag.needs.fix}." if flag.needs is not None else ""
        yield f"`{name}`", "without effect", f"{flag.reason[0].upper()}{flag.reason[1:]}.{only}"


def _refused(flags: Mapping[str, str]) -> Iterator[Row]:
    for name, advice in flags.items():
        passed = " or ".join(values_that_ask_for_nothing(name))
        yield f"`{name}`", "refused", f"{advice[0].upper()}{advice[1:]}.{passed and f' Accepted with {passed}.'}"


def main() -> None:
    write(PAGE, {begin: table() for begin, table in TABLES.items()})


if __name__ == "__main__":
    main()
