"""The table of docs/megatron_flags.md: every flag of Megatron-LM, and what it does here.

python -m tests.helpers.flag_table        writes it anew
"""

from collections.abc import Iterator

from megatron.training.cli.config import FLAGS
from megatron.training.cli.fields import Flag
from megatron.training.cli.unsupported import UNSUPPORTED_FLAGS
from megatron.training.cli.without_effect import WITHOUT_EFFECT
from tests.helpers.module_map import ROOT

PAGE = ROOT / "docs/megatron_flags.md"
BEGIN, END = "<!-- the table, from the code -->", "<!-- end of the table -->"


def flag_table() -> str:
    """A line per flag, in the order of the names."""
    rows = sorted([*_supported(), *_without_effect(), *_refused()], key=lambda row: row[0].strip("`").lower())
    counts = {here: sum(row[1] == here for row in rows) for here in ("supported", "without effect", "refused")}
    total = ", ".join(f"{count} {here}" for here, count in counts.items())
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"{len(rows)} flags: {total}.", "", "| flag | here | |", "|---|---|---|", *lines])


def written() -> str:
    """What the page has of it."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return rest.partition(END)[0].strip()


def _supported() -> Iterator[tuple[str, str, str]]:
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


def _without_effect() -> Iterator[tuple[str, str, str]]:
    for name, flag in WITHOUT_EFFECT.items():
        only = f" Refused without {flag.needs.fix}." if flag.needs is not None else ""
        yield f"`{name}`", "without effect", f"{flag.reason[0].upper()}{flag.reason[1:]}.{only}"


def _refused() -> Iterator[tuple[str, str, str]]:
    for name, advice in UNSUPPORTED_FLAGS.items():
        yield f"`{name}`", "refused", f"{advice[0].upper()}{advice[1:]}."


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{flag_table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
