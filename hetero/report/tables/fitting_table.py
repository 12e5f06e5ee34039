"""A table that can be read on a terminal of any width: where it is too wide, it closes up, then goes on below."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

LONGEST_WORD = 24
"""A word of more columns may be folded; a shorter one is never broken."""

MOST_LINES = 3
"""A line of a cell is broken into about so many at most, while they are no longer than :data:`LONGEST_WORD`."""

SPACIOUS, CLOSE = 3, 1
"""Columns that a column of a table takes beside its text: with lines and spaces around it, and with one space."""


class FittingTable(Table):
    """A table with lines around its cells, as far as the words of all columns have room side by side.

    On a narrower terminal it has no lines between columns, and if that is not enough, the columns that have no room
    follow below, behind the first ones again. No cell is cut short.

    Args:
        keys: so many of the first columns name the row, and are repeated.
    """

    def __init__(self, *headers: str, title: str | None = None, caption: str | None = None, keys: int = 1) -> None:
        super().__init__(
            *headers, title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SQUARE
        )
        self.keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sizes = [_size(console, options, column) for column in self.columns]
        room = options.max_width - 1
        if sum(size.minimum + SPACIOUS for size in sizes) <= room:
            yield self._part(range(len(sizes)), _widths(sizes, room - SPACIOUS * len(sizes)), is_close=False)
            return
        parts = list(_parts([size.minimum for size in sizes], self.keys, options.max_width))
        for i, part in enumerate(parts):
            spare = options.max_width - CLOSE * (len(part) - 1)
            yield self._part(part, _widths([sizes[c] for c in part], spare), is_close=True)
            if i + 1 < len(parts):
                yield ""
        if self.caption is not None:
            yield console.render_str(str(self.caption), style="table.caption")

    def _part(self, part: Sequence[int], widths: Sequence[int], *, is_close: bool) -> Table:
        """Some of the columns as a table of their own."""
        found = Table(
            title=self.title if part[-1] < len(part) else None,
            title_justify="left",
            caption=None if is_close else self.caption,
            caption_justify="left",
            box=box.SIMPLE_HEAD if is_close else box.SQUARE,
            show_edge=not is_close,
            pad_edge=not is_close,
            padding=0 if is_close else (0, 1),
        )
        chosen = [self.columns[c] for c in part]
        for column, width in zip(chosen, widths, strict=True):
            found.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        cells = [list(column.cells) for column in chosen]
        for i, row in enumerate(self.rows):
            found.add_row(*(column[i] for column in cells), style=row.style, end_section=row.end_section)
        return found


def _size(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """The least columns that a column of a table is read in, up to :data:`LONGEST_WORD`, and those of its longest
    line."""
    unlimited = options.update(width=10_000)
    sizes = [Measurement.get(console, unlimited, cell) for cell in (column.header, *column.cells)]
    longest = max(size.maximum for size in sizes)
    word = longest if column.no_wrap else max(size.minimum for size in sizes)
    least = max(word, -(-longest // MOST_LINES))
    return Measurement(max(1, min(least, LONGEST_WORD)), max(1, longest))


def _parts(least: Sequence[int], num_keys: int, room: int) -> Iterator[list[int]]:
    """Split columns into as few runs as have room, each behind the keys; one column beside them at least."""
    keys = list(range(num_keys))
    part = list(keys)
    for c in range(num_keys, len(least)):
        if len(part) > num_keys and sum(least[each] + CLOSE for each in (*part, c)) > room + CLOSE:
            yield part
            part = list(keys)
        part.append(c)
    yield part


def _widths(sizes: Sequence[Measurement], room: int) -> list[int]:
    """The longest words; what is left of ``room`` makes as many columns as it can whole, those that lack least first,
    and the rest goes to those whose lines would be broken most."""
    widths = [size.minimum for size in sizes]
    spare = room - sum(widths)
    for c in sorted(range(len(sizes)), key=lambda c: sizes[c].maximum - widths[c]):
        if (lacks := sizes[c].maximum - widths[c]) <= spare:
            widths[c] += lacks
            spare -= lacks
    for _ in range(spare):
        neediest = max(range(len(sizes)), key=lambda c: sizes[c].maximum / widths[c])
        if sizes[neediest].maximum <= widths[neediest]:
            break
        widths[neediest] += 1
    return widths
