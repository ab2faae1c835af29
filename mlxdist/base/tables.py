"""Tables of rich as plain text, and numbers of bytes in them."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["size", "text"]


def text(table: Table, notes: Sequence[str], width: int = 160) -> str:
    """The table without colors, and as wide as `width` at most."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, highlight=False)
    console.print(table)
    for note in notes:
        console.print(f"Note: {note}", markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def size(number: int) -> str:
    """1536 as "1.50 KiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number} B"
