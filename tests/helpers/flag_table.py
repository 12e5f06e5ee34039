"""The tables of docs/megatron_flags.md: every flag of Megatron-LM and of its preprocess_data.py, and what it does here.

python -m tests.helpers.flag_table        writes them
"""

from collections.abc import Iterator, Mapping

from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.fields import Flag
from megatron.pretrain.cli.preprocess_flags import IGNORED_PREPROCESS_FLAGS, REFUSED_PREPROCESS_FLAGS
from megatron.pretrain.cli.unsupported import UNSUPPORTED_FLAGS, values_that_ask_for_nothing
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT, WithoutEffect
from tests.helpers.module_map import ROOT
from tools import preprocess_data

PAGE = ROOT / "docs/megatron_flags.md"
END = "<!-- end of the table -->"

Row = tuple[str, str, str]

NOT_MEGATRONS = {"--help", "--input-format", "--pattern", "--overwrite", "--skip-bad"}
"""Flags of our preprocess_data.py that Megatron-LM's does not have."""


def flag_table() -> str:
    """Return a line per flag of training, in the order of the names."""
    return _table([*_supported(), *_without_effect(WITHOUT_EFFECT), *_refused(UNSUPPORTED_FLAGS)])


def preprocess_table() -> str:
    """Return a line per flag of preprocess_data.py, in the order of the names."""
    ignored, refused = IGNORED_PREPROCESS_FLAGS, REFUSED_PREPROCESS_FLAGS
    return _table([*_supported_by_preprocess(), *_without_effect(ignored), *_refused(refused)])


TABLES = {
    "<!-- the table, from the code -->": flag_table,
    "<!-- the table of preprocess_data.py, from the code -->": preprocess_table,
}
"""The lines of the page that the tables follow."""


def written(begin: str) -> str:
    """Return what the page has of the table after ``begin``."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    return rest.partition(END)[0].strip()


def _table(rows: list[Row]) -> str:
    rows = sorted(rows, key=lambda row: row[0].strip("`").lower())
    counts = {here: sum(row[1] == here for row in rows) for here in ("supported", "without effect", "refused")}
    total = ", ".join(f"{count} {here}" for here, count in counts.items())
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"{len(rows)} flags: {total}.", "", "| flag | here | |", "|---|---|---|", *lines])


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
    if flag.type.shown.startswith("{"):
        return f" Takes {flag.type.limit}{default}."
    return f" W{default[3:]}." if default else ""


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
    text = PAGE.read_text(encoding="utf-8")
    for begin, table in TABLES.items():
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
