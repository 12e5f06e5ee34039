"""The tables of docs/network.md: every socket on which something of this project listens.

python -m tests.helpers.listening_table        writes them
"""

from collections.abc import Sequence

from hetero.listening import LISTENING_SOCKETS
from tests.helpers.generated_parts import table_row, write
from tests.helpers.sources import ROOT

PAGE = ROOT / "docs/network.md"


def address_table() -> str:
    """Return where each socket listens, and in which runs."""
    rows = [(row.name, row.process, ", ".join(row.runs), row.reach, row.address, row.port) for row in LISTENING_SOCKETS]
    columns = ("socket", "opened by", "in runs", "who can connect", "address", "port or path")
    return _table(columns, rows)


def peer_table() -> str:
    """Return who has to reach each socket, what it may do, and what a firewall lets through."""
    rows = [(row.name, row.reached_by, row.power, row.firewall or "nothing to do") for row in LISTENING_SOCKETS]
    return _table(("socket", "has to be reached by", "who connects may", "firewall"), rows)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join([table_row(columns), "|---" * len(columns) + "|", *map(table_row, rows)])


TABLES = {
    "<!-- where sockets listen, from the code -->": address_table,
    "<!-- what peers may do, from the code -->": peer_table,
}
"""The lines of the page that the tables follow."""


if __name__ == "__main__":
    write(PAGE, {begin: table() for begin, table in TABLES.items()})
