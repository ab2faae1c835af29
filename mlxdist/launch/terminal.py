"""Facts about the launcher's terminal that its ranks cannot see: colors and widths."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence

__all__ = ["RANK_COLORS", "as_shown", "colors_wanted", "prefix_of", "terminal_variables", "width_of", "without_escapes"]

RANK_COLORS = (36, 33, 32, 35, 34, 31)  # of the prefixes, by rank

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def terminal_variables(given: Mapping[str, str], labels: Sequence[str]) -> dict[str, str]:
    """The variables that describe the terminal behind the pipe to programs: whether it has colors, and its size.

    ``given``: variables of the ranks, which are kept; those of other hosts do not describe this terminal. The result is
    empty unless both of the launcher's streams are terminals.
    """
    if not (os.isatty(1) and os.isatty(2)):
        return {}
    size = shutil.get_terminal_size()
    # The launcher puts the label in front of each line, so a rank has fewer columns than the terminal.
    variables = {"COLUMNS": str(max(20, size.columns - len(prefix_of(labels[0])))), "LINES": str(size.lines)}
    if colors_wanted(os.environ | given):
        variables["FORCE_COLOR"] = "1"
    return {name: value for name, value in variables.items() if name not in given}


def colors_wanted(environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def prefix_of(label: str) -> bytes:
    return f"[{label}] ".encode()


def without_escapes(line: bytes) -> bytes:
    return _ESCAPES.sub(b"", line)


def as_shown(line: bytes) -> str:
    """A line as it is on a terminal in the end: without escape sequences, and of a progress bar the last update."""
    return without_escapes(line).rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def width_of(line: bytes) -> int:
    return len(without_escapes(line).decode(errors="replace"))
