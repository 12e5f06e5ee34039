"""Megatron-LM's own parsers: what each supported megatron-core's has of flags, numbers of values, defaults and choices.

The wheels of megatron-core have ``megatron/training/arguments.py`` from 0.17.0 on, so that the parser itself is asked.
Neither the wheel nor the source archive of 0.16.1 has one. The answers are kept in ``tests/data/megatron_flags``, a
file per version.

python -m tests.helpers.megatron_parsers        writes the file of the megatron-core that is installed
"""

import argparse
import csv
import enum
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hetero.runtime import cpu_backend
from tests.helpers.megatron_core_wheels import NEWEST
from tests.helpers.sources import ROOT

FOLDER = ROOT / "tests/data/megatron_flags"
VERSIONS = NEWEST[1:]
"""Releases of megatron-core whose parsers are recorded: the last of each minor version whose wheel has one."""

PREPROCESS_DATA = "preprocess_data"
"""Record of the flags of tools/preprocess_data.py, whose first lines say where they are from."""

_COLUMNS = ("flag", "values", "default", "choices")


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """Holds what Megatron-LM's parser says of a flag.

    values: how many it takes: "0" for a switch, "+" for one or more, else a number.
    default: empty for a switch, and where there is none.
    """

    values: str
    default: str = ""
    choices: tuple[str, ...] = ()

    @property
    def most_values(self) -> float:
        return float("inf") if self.values == "+" else int(self.values)


def installed_version() -> str:
    """Return the release of megatron-core that is installed."""
    return metadata.version("megatron-core")


def ask_installed_parser() -> dict[str, MegatronFlag]:
    """Build the parser of the installed megatron-core (0.17 or newer) and describe its flags by name."""
    cpu_backend.install()
    arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    return {name: _describe(action) for action in parser._actions for name in action.option_strings}


@functools.cache
def recorded_parser(version: str) -> Mapping[str, MegatronFlag]:
    """Read the recorded flags of one of ``VERSIONS``, or of ``PREPROCESS_DATA``, by name."""
    with _path(version).open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader((line for line in file if not line.startswith("#")), delimiter="\t")
        return {row["flag"]: MegatronFlag(row["values"], row["default"], tuple(row["choices"].split())) for row in rows}


def write_record(version: str, flags: Mapping[str, MegatronFlag]) -> None:
    """Write the file that :func:`recorded_parser` reads."""
    with _path(version).open("w", encoding="utf-8", newline="") as file:
        file.write(f"# Flags of the parser in the wheel of megatron-core {version}, megatron/training/arguments.py.\n")
        file.write(f"# python -m tests.helpers.megatron_parsers, where megatron-core {version} is installed\n")
        rows = csv.writer(file, delimiter="\t", lineterminator="\n")
        rows.writerow(_COLUMNS)
        rows.writerows(
            (name, flag.values, flag.default, " ".join(flag.choices)) for name, flag in sorted(flags.items())
        )


def _path(version: str) -> Path:
    return FOLDER / f"{version}.tsv"


def _describe(action: argparse.Action) -> MegatronFlag:
    values = "1" if action.nargs in (None, "?") else str(action.nargs).replace("*", "+")
    if isinstance(action, argparse.BooleanOptionalAction):
        values = "0"
    if values == "0":
        return MegatronFlag(values)
    return MegatronFlag(values, _text(action.default), tuple(_text(choice) for choice in action.choices or ()))


def _text(value: object) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_text, value))
    return value.name if isinstance(value, enum.Enum) else str(value)


if __name__ == "__main__":
    write_record(installed_version(), ask_installed_parser())
