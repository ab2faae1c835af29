"""The Python stacks of all ranks as text, for `mlxdist dump`."""

import os
import re
from collections.abc import Sequence

from rich.text import Text

from mlxdist.base.errors import name_ranks
from mlxdist.runtime.observation.stack_groups import StackGroup

__all__ = ["stack_text"]

_LIBRARY = re.compile(r".*/(?:site-packages|lib/python3\.\d+)/")


def stack_text(groups: Sequence[StackGroup]) -> Text:
    """A paragraph for each group: its ranks and thread, then the calls, the most recent one first."""
    text = Text("\nPython stacks, the most recent call first:")
    for group in groups:
        text.append(f"\n\n{name_ranks(group.ranks)}, {group.thread}", "bold")
        for call in group.calls:
            place, _, function = call.rpartition(" ")
            text.append(f"\n    {_short(place)}", "dim" if _LIBRARY.match(place) else "")
            text.append(f"  {function}")
    return text


def _short(place: str) -> str:
    """The file without the directory of libraries, or the current directory."""
    return _LIBRARY.sub("", place).removeprefix(f"{os.getcwd()}{os.sep}")
