"""Sizes in bytes, as users write and read them: 64KiB, 16MiB, 100."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["Size", "format_size", "parse_size", "size_range"]

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
LARGEST = 8 << 30


def parse_size(text: str) -> int:
    """A number of bytes, or of KiB, MiB, GiB.

    Raises:
        ValueError: it is none, or not from 1 byte to 8 GiB.
    """
    match = re.fullmatch(r"([0-9]{1,10}) ?([KMG]iB)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(match[1]) * UNITS[(match[2] or "").upper()] if match else 0
    if not 1 <= size <= LARGEST:
        raise ValueError(f"{text!r} is not a size from 1 to 8GiB; write 4096, 64KiB or 16MiB")
    return size


def format_size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % (unit // 16) == 0:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def size_range(smallest: int, largest: int) -> list[int]:
    """From the smallest on, each four times the one before, as far as the largest."""
    sizes = [smallest]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return sizes


class Size(click.ParamType):
    """A size on the command line; with ``many`` a list of them, separated by commas."""

    name = "size"

    def __init__(self, many: bool = False) -> None:
        self.many = many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | list[int]:
        try:
            if self.many:
                return sorted({parse_size(part) for part in value.split(",")})
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
