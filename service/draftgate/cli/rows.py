"""Names and values: a table on a terminal, in a pipe one line a row, a tab between the two."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from draftgate.cli.render import clean, write_lines

__all__ = ["print_rows"]


def print_rows(rows: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print them on standard output."""
    console = Console()
    if not console.is_terminal:
        write_lines(sys.stdout, *(f"{name}\t{value}" for name, value in rows))
        return
    table = Table(title=title or None, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(clean(name), clean(value))
    console.print(table, markup=False)
