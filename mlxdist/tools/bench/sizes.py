"""Types of options of benchmarks: sizes in bytes, as 64KiB, 16MiB or 100, and lists of names and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from mlxdist.base import tables

__all__ = [
    "SIZE",
    "SIZES",
    "Parsed",
    "check_range",
    "check_sizes",
    "multiples_of",
    "names_of",
    "parse_size",
    "size_range",
    "sized_cases",
]

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
LARGEST = 8 << 30
# Operations on arrays that have a part of each rank.
_IN_PARTS = ("all_gather", "all_to_all", "all_to_all_v", "gather", "reduce_scatter", "scatter", "sum_scatter")


def parse_size(text: str) -> int:
    """Parses a number of bytes, or of KiB, MiB, GiB.

    Raises:
        ValueError: the text is no size, or not from 1 byte to 8 GiB.
    """
    match = re.fullmatch(r"([0-9]{1,10}) ?([KMG]iB)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(match[1]) * UNITS[(match[2] or "").upper()] if match else 0
    if not 1 <= size <= LARGEST:
        raise ValueError(f"{text!r} is not a size from 1 to 8GiB; write 4096, 64KiB or 16MiB")
    return size


def size_range(smallest: int, largest: int) -> list[int]:
    """Sizes from the smallest up to the largest, each four times the one before."""
    sizes = [smallest]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return sizes


def unit_of(operation: str, dtype: str, ranks: int) -> int:
    """The bytes that an operation's size must be a multiple of: one element, or one element for each rank's part."""
    itemsize = int(re.sub("[^0-9]", "", dtype) or 8) // 8  # the bits are in the name, but for bool
    return itemsize * (ranks if operation in _IN_PARTS else 1)


def sized_cases(kinds: Iterable[tuple[str, str]], sizes: Sequence[int], ranks: int) -> list[dict[str, Any]]:
    """Cases of each operation and dtype with each size, rounded down so that each rank has an equal part."""
    return [
        {"operation": operation, "dtype": dtype, "bytes": size // unit * unit}
        for operation, dtype in kinds
        for unit in [unit_of(operation, dtype, ranks)]
        for size in sizes
    ]


def check_sizes(sizes: Sequence[int], cases: Iterable[tuple[str, str]], ranks: int) -> None:
    """Raises click.BadParameter: one of the ``cases``, operations and dtypes, has no arrays of one of the sizes."""
    for operation, dtype in cases:
        unit = unit_of(operation, dtype, ranks)
        for size in sizes:
            if size % unit:
                near = [str(found) for found in (size // unit * unit, -(-size // unit) * unit) if found]
                raise click.BadParameter(
                    f"{operation} of {dtype} on {ranks} ranks has no size of {size} B, only multiples of "
                    f"{unit} B; write {' or '.join(near)}",
                    param_hint="--sizes",
                )


def check_range(smallest: int, cases: Iterable[tuple[str, str]], ranks: int) -> None:
    """Raises click.BadParameter: rounding the smallest size of a `size_range` down to a whole unit would leave 0."""
    for operation, dtype in cases:
        if smallest < (unit := unit_of(operation, dtype, ranks)):
            problem = f"{tables.size(smallest)} is too little for {operation} of {dtype} on {ranks} ranks"
            raise click.BadParameter(f"{problem}; write at least {unit}", param_hint="--min")


class Parsed(click.ParamType):
    """A type of options whose values a function parses; the function raises ValueError for wrong ones."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = Parsed("size", parse_size)
SIZES = Parsed("sizes", lambda text: sorted({parse_size(part) for part in text.split(",")}))


def names_of(known: Sequence[str]) -> Parsed:
    """A type of options: known names separated by commas; "all" means all of them."""

    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return Parsed("names", parse)


def multiples_of(unit: int) -> Parsed:
    """A type of options: multiples of ``unit`` up to 65536, separated by commas."""

    def parse(text: str) -> list[int]:
        for part in text.split(","):
            if not part.isdecimal() or not unit <= int(part) <= 1 << 16 or int(part) % unit:
                multiple = f"a multiple of {unit}" if unit > 1 else "a number"
                raise ValueError(f"{part!r} is not {multiple} from {unit} to 65536")
        return sorted({int(part) for part in text.split(",")})

    return Parsed("numbers", parse)
