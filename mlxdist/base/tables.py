"""Tables of rich as plain text, and numbers of bytes in them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["size", "text"]


def text(table: Table, notes: Sequence[str], width: int = 160) -> str:
    """The table without colors, and as wide as `width` at most."""
    from rich.console import Console  # only now: commands that print no table need none

    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, highlight=False)
    console.print(table)
    for note in notes:
        console.print(f"Note: {note}", markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def size(number: int) -> str:
    """A number of bytes as text: "1.5 KiB" for 1536, "39.06 KiB" for 40,000; exact below 10,000: "4092 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit and number % (unit // 4) == 0:
            return f"{number / unit:g} {name}"
        if number >= max(unit, 10_000):
            return f"{number / unit:.2f} {name}"
    return f"{number} B"
