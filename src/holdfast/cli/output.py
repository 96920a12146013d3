"""How a command speaks: tables and colour in a terminal, plain aligned text in a pipe, JSON for programs.

Everything that is written as a cell or a field goes through `visible`: job data is foreign text.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.cli.wording import masked, visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_GAP = "  "
_LEAST_WIDTH = 16
_WIDEST = 10_000


class Column(msgspec.Struct, frozen=True):
    """A column of a table. `fit`: what a terminal does to the last column if there is too little space for it."""

    title: str
    right: bool = False
    fit: Literal["cut", "wrap"] | None = None


class Cell(msgspec.Struct, frozen=True):
    """Text, with the style that it has in a terminal."""

    text: str
    style: str = ""


Row = Sequence[Cell | str]


def in_terminal() -> bool:
    """Whether a person reads the output as it is written."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def write_line(text: str) -> None:
    """One line of the answer. It holds no foreign text: that goes through `visible` first."""
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """One line for people beside the answer: it does not disturb who reads the answer from a pipe."""
    sys.stderr.write(f"{visible(masked(text))}\n")


def write_json(record: Mapping[str, Any]) -> None:
    """One object on one line. In ASCII, so that no character of a job reaches a terminal as a command."""
    sys.stdout.write(f"{json.dumps(record, ensure_ascii=True)}\n")


def write_table(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """A table, or nothing at all if it has no rows."""
    cleaned = [[_cleaned(cell) for cell in row] for row in rows]
    if not cleaned:
        return
    if in_terminal():
        write_rich(rich_table(columns, cleaned))
        return
    titles = [Cell(column.title) for column in columns]
    lines = [titles, *cleaned]
    widths = [max(len(line[at].text) for line in lines) for at in range(len(columns))]
    for line in lines:
        padded = (
            cell.text.rjust(width) if column.right else cell.text.ljust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        )
        write_line(_GAP.join(padded).rstrip())


def write_fields(fields: Sequence[tuple[str, Cell | str]]) -> None:
    """Names and values below each other."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        cell = _cleaned(value)
        write_styled((f"{name:<{width}}{_GAP}", "bold"), (cell.text, cell.style))


def write_block(text: str, indent: str = "    ") -> None:
    """Foreign text of several lines, as a traceback."""
    for line in text.splitlines():
        write_line(f"{indent}{visible(line.expandtabs(4))}")


def write_styled(*parts: tuple[str, str]) -> None:
    """A line of (text, style). The text is clean already."""
    if not in_terminal():
        write_line("".join(text for text, _ in parts).rstrip())
        return
    from rich.text import Text

    write_rich(Text.assemble(*parts))


def rich_table(columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    """The table as a terminal shows it."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cleaned = [[_cleaned(cell) for cell in row] for row in rows]
    # The separator between two columns is one blank wide, the padding makes it two.
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    left = shutil.get_terminal_size().columns - (len(columns) - 1) * len(_GAP)
    for at, column in enumerate(columns):
        needed = max(cell_len(text) for text in (column.title, *(row[at].text for row in cleaned)))
        width = min(needed, max(left, _LEAST_WIDTH)) if column.fit else needed
        left -= width
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            width=width,
            no_wrap=column.fit != "wrap",
            overflow="fold" if column.fit == "wrap" else "ellipsis",
        )
    for row in cleaned:
        # As Text, never as str: rich would read "[red]" in a job's error message as markup.
        table.add_row(*(Text(cell.text, cell.style) for cell in row))
    return table


def write_rich(renderable: RenderableType) -> None:
    """Anything that rich can draw, in a terminal. What is wider than the terminal is broken by it, never cut."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(markup=False, highlight=False, emoji=False)
    wide = console.options.update(max_width=_WIDEST)
    needed = Measurement.get(console, wide, renderable).maximum
    console.width = max(console.width, needed)
    console.print(renderable)


def _cleaned(cell: Cell | str) -> Cell:
    return Cell(visible(cell)) if isinstance(cell, str) else Cell(visible(cell.text), cell.style)
