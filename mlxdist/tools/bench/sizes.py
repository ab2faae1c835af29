"""What benchmarks take on the command line: sizes in bytes, as 64KiB, 16MiB, 100, and lists of names and numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

__all__ = [
    "Names",
    "Numbers",
    "Size",
    "check_range",
    "check_sizes",
    "format_size",
    "parse_size",
    "size_range",
    "unit_of",
]

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
LARGEST = 8 << 30
# Operations on arrays that have a part of each rank.
_IN_PARTS = ("all_gather", "all_to_all", "reduce_scatter", "sum_scatter")


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


def unit_of(operation: str, dtype: str, ranks: int) -> int:
    """What the size of an operation is a multiple of, in bytes: an element, or one of each rank's part."""
    itemsize = int(re.sub("[^0-9]", "", dtype) or 8) // 8  # the bits are in the name, but for bool
    return itemsize * (ranks if operation in _IN_PARTS else 1)


def check_sizes(sizes: Sequence[int], cases: Iterable[tuple[str, str]], ranks: int) -> None:
    """``cases``: operations and dtypes that are to be measured with each of the sizes, in bytes.

    Raises:
        click.BadParameter: one of them has no arrays of such a size.
    """
    for operation, dtype in cases:
        unit = unit_of(operation, dtype, ranks)
        for size in sizes:
            if size % unit:
                near = [str(found) for found in (size // unit * unit, -(-size // unit) * unit) if found]
                raise click.BadParameter(
                    f"{operation} of {dtype} on {ranks} ranks has no size of {format_size(size)}, only multiples of "
                    f"{unit} B; write {' or '.join(near)}",
                    param_hint="--sizes",
                )


def check_range(smallest: int, cases: Iterable[tuple[str, str]], ranks: int) -> None:
    """The same for the sizes of `size_range`, which are rounded down.

    Raises:
        click.BadParameter: nothing would be left of the smallest.
    """
    for operation, dtype in cases:
        if smallest < (unit := unit_of(operation, dtype, ranks)):
            problem = f"{format_size(smallest)} is too little for {operation} of {dtype} on {ranks} ranks"
            raise click.BadParameter(f"{problem}; write at least {unit}", param_hint="--min")


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


class Names(click.ParamType):
    """Names separated by commas, each of them known; "all" is all of them."""

    name = "names"

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        names = list(self.known) if value == "all" else list(dict.fromkeys(value.split(",")))
        for name in names:
            if name not in self.known:
                self.fail(f"{name!r} is not one of {', '.join(self.known)}", param, ctx)
        return names


class Numbers(click.ParamType):
    """Whole numbers from ``unit`` to 65536 separated by commas, each a multiple of ``unit``."""

    name = "numbers"

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        for text in value.split(","):
            if not text.isdecimal() or not self.unit <= int(text) <= 1 << 16 or int(text) % self.unit:
                multiple = f"a multiple of {self.unit}" if self.unit > 1 else "a number"
                self.fail(f"{text!r} is not {multiple} from {self.unit} to 65536", param, ctx)
        return sorted({int(text) for text in value.split(",")})
