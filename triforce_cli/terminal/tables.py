"""Tables that fit a terminal of 80 columns, and the lines around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def make_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> Table:
    """A table without lines. Columns whose title is in `left` are aligned left and may wrap. The others are numbers,
    which are aligned right and do not wrap."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=title not in left)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cell: Callable[[Any], str]
    """The text for one row."""
    left: bool = False
    """Whether it is aligned left and may wrap."""


def print_table(console: Console, columns: Iterable[Column], rows: Iterable[Any]) -> None:
    """Args: `rows` are whatever the columns' cells are made from."""
    columns = list(columns)
    cells = [[column.cell(row) for column in columns] for row in rows]
    left = [column.title for column in columns if column.left]
    console.print(make_table([column.title for column in columns], cells, left))


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Prints lines as they are: a terminal wraps them, a file keeps them whole."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
