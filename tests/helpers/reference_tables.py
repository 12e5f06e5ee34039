"""The tables of docs/hetero_flags.md, docs/commands.md and docs/plan_format.md, made from the code.

python -m tests.helpers.reference_tables        writes them anew
"""

import argparse
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hetero.cli import command_parser
from hetero.plan.ir import GradientSyncPlan, Plan, Replica, Stage
from hetero.plan.offload import Offload
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.spec.model import ModelSpec, RotaryScaling
from megatron.pretrain.cli.config import FLAGS, GROUPS
from megatron.pretrain.cli.fields import Flag
from tests.helpers.sources import ROOT

BEGIN, END = "<!-- from the code: python -m tests.helpers.reference_tables -->", "<!-- end of what is from the code -->"

PLAN_PARTS = (
    ("The file", Plan),
    ("A replica", Replica),
    ("A stage", Stage),
    ("What a stage leaves to its hosts", Offload),
    ("Gradient sums", GradientSyncPlan),
    ("The model", ModelSpec),
    ("Rotary scaling", RotaryScaling),
    ("Provenance", PlanProvenance),
    ("The prediction in it", PlanPrediction),
)
"""Headings of docs/plan_format.md, and the class that each of them describes."""

_ELSEWHERE = {
    "format_version": "Of this format. Files of earlier versions are read.",
    "replicas": "See [a replica](#a-replica).",
    "stages": "In the order of the layers; see [a stage](#a-stage).",
    "model": "See [the model](#the-model).",
    "gradient_sync": "See [gradient sums](#gradient-sums).",
    "provenance": "Where the plan comes from, or null; see [provenance](#provenance).",
    "offload": "What lives in the memory of the host; see [there](#what-a-stage-leaves-to-its-hosts).",
    "cluster": "The [cluster](cluster.md) that the plan was made for, with the figures that it had then.",
    "prediction": "See [there](#the-prediction-in-it).",
    "devices": "Descriptions of the device types of its stages that do not ship, as in a [cluster file](devices.md).",
}
"""Fields whose values have a section or a page of their own."""


def hetero_flags() -> str:
    """A table per group of ``--help``, of the flags that Megatron-LM does not have."""
    own = [flag for flag in FLAGS if flag.name.startswith("--hetero-")]
    own.sort(key=lambda flag: GROUPS.index(flag.group))
    titles = itertools.groupby(own, key=lambda flag: flag.group.partition(":")[0])
    return "\n\n".join(_section(title.capitalize(), map(_flag_row, flags), "flag") for title, flags in titles)


def _flag_row(flag: Flag) -> tuple[str, str, str]:
    name = f"`{flag.name}`" if flag.type is None else f"`{flag.name} {flag.type.shown}{' ...' if flag.many else ''}`"
    default = (
        ""
        if flag.type is None or flag.default in (None, ())
        else f"{flag.default:g}"
        if isinstance(flag.default, float)
        else str(flag.default)
    )
    beside = [f"Only with {condition.fix}." for condition in flag.relations.needs if condition.fix not in flag.help]
    beside += [f"Not beside {other}." for other in flag.relations.excludes]
    return name, default, " ".join([flag.help, *beside])


@cache
def hetero_parser() -> argparse.ArgumentParser:
    """The parser of ``hetero`` with all its commands."""
    return command_parser()


def hetero_commands() -> str:
    """A table per command, of its arguments."""
    return "\n\n".join(
        f"## {parser.prog}\n\n{_sentence(parser.description or about)}\n\n{_argument_table(parser)}"
        for parser, about in _commands(hetero_parser(), "")
    )


def _commands(parser: argparse.ArgumentParser, about: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every command that does something, with the line that ``--help`` of the command around it has about it."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser, about
    for group in groups:
        helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, each in group.choices.items():
            yield from _commands(each, helps.get(name, ""))


def _argument_table(parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = (
            formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
            if (action.option_strings and action.nargs != 0)
            else ""
        )
        text = _one_line(formatter._expand_help(action)) if action.help else ""
        must = "required" if action.required and action.option_strings else ""
        rows.append((f"`{f'{name} {value}'.strip()}`", "; ".join(filter(None, [must, text]))))
    return _table(("argument", ""), rows)


def plan_format() -> str:
    """A table per part of a plan file, of its fields."""
    return "\n\n".join(_section(title, _field_rows(cls), "field", "type") for title, cls in PLAN_PARTS)


def _field_rows(cls: Any) -> Iterator[tuple[str, str, str, str]]:
    texts = field_texts(inspect.getdoc(cls) or "")
    types = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        text = _ELSEWHERE.get(field.name) or texts.get(field.name, "")
        yield f"`{field.name}`", _type(types[field.name]), _default(field), text[:1].upper() + text[1:]


def field_texts(docstring: str) -> dict[str, str]:
    """What a docstring says of each field, in lines that begin with the field's name and those indented below."""
    found: dict[str, str] = {}
    for names, text in re.findall(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.*(?:\n {4}.*)*)", docstring, re.MULTILINE):
        plain = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", _one_line(text)).replace("``", "`")
        plain = plain.replace("`None`", "`null`")
        found.update(dict.fromkeys(names.split(", "), plain))
    return found


def _type(annotation: Any) -> str:
    """How JSON has it."""
    text = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    if "Literal" not in text:
        text = re.sub(r"\b[A-Z]\w+(?<!None)\b", "object", text)
    text = re.sub(r"Literal\[([^]]*)\]", lambda found: found[1].replace("'", "").replace(", ", " or "), text)
    while re.search(r"tuple\[([^][]*), \.\.\.\]", text):
        text = re.sub(r"tuple\[([^][]*), \.\.\.\]", r"list of \1", text)
    for python, here in (("int", "whole number"), ("float", "number"), ("str", "text"), ("bool", "true or false")):
        text = re.sub(rf"\b{python}\b", here, text)
    return text.replace(" | None", ", or null")


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is None:
        return "null"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if dataclasses.is_dataclass(field.default):
        return "nothing"
    return "none" if field.default == () else str(field.default)


def _section(title: str, rows: "Iterator[Sequence[str]] | map[Any]", first: str, *more: str) -> str:
    return f"## {title}\n\n{_table((first, *more, 'default', ''), list(rows))}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{_one_line(text[1:]).removesuffix('.')}."


def _one_line(text: str) -> str:
    return " ".join(text.split())


TABLES: dict[Path, Callable[[], str]] = {
    ROOT / "docs/hetero_flags.md": hetero_flags,
    ROOT / "docs/commands.md": hetero_commands,
    ROOT / "docs/plan_format.md": plan_format,
}
"""What stands between the two marks of each page."""


def written(page: Path) -> str:
    """What the page has of it."""
    _, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return rest.partition(END)[0].strip()


def main() -> None:
    for page, table in TABLES.items():
        head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
