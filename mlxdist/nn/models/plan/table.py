"""A plan as a table: one line for what is the same in all layers, with the bytes on each rank."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

from rich.table import Table

from mlxdist.base.tables import size

from .parameters import Shard, runs_of

__all__ = ["fold", "table"]

# With more ranks than this, columns for the smallest and the largest stand for all.
_MAX_COLUMNS = 4
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_HOLE = "\0"  # in place of a number; no path has it


def table(title: str, ranks: int, shards: Sequence[Shard]) -> Table:
    """A plan as a table of rich."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", expand=False)
    result.add_column("parameter", no_wrap=True)
    result.add_column("shape", no_wrap=True)
    result.add_column("sharded", no_wrap=True)
    few = ranks <= _MAX_COLUMNS
    for name in [f"rank {rank}" for rank in range(ranks)] if few else ["least", "most"]:
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("why it is full", overflow="fold")
    for name, alike in fold(shards):
        shard = alike[0]
        result.add_row(
            name,
            " x ".join(map(str, shard.shape)) or "scalar",
            describe(shard),
            *_columns([sum(one.bytes(rank) for one in alike) for rank in range(ranks)], few),
            shard.reason,
        )
    result.add_section()
    totals = [sum(shard.bytes(rank) for shard in shards) for rank in range(ranks)]
    full = sum(shard.full_bytes for shard in shards)
    share = f"{max(totals) / full:.0%} of {size(full)} at most" if full else ""
    result.add_row("in all", "", "", *_columns(totals, few), share, style="bold")
    return result


def describe(shard: Shard) -> str:
    """How a parameter is sharded, in a few words."""
    if not shard.ranges:
        return "full" if shard.scale == 1 else f"full, times {shard.scale:.3g}"
    segments = f", {len(shard.segments)} pieces" if len(shard.segments) > 1 else ""
    copies = sum(shard.sizes) / max(1, shard.shape[shard.axis])
    held = f", on {copies:.3g} ranks" if copies > 1 else ""
    uneven = f" {':'.join(map(str, shard.sizes))}" if len(set(shard.sizes)) > 1 else ""
    return f"{shard.kind}, axis {shard.axis}{uneven}{segments}{held}"


def fold(shards: Sequence[Shard]) -> Iterator[tuple[str, list[Shard]]]:
    """Groups what differs only in numbers in its path: ("model.layers.{0-31}.mlp.up_proj.weight", its shards)."""
    groups: dict[tuple, list[Shard]] = {}
    for shard in shards:
        what = shard.kind, shard.shape, shard.axis, shard.ranges, shard.scale, shard.reason
        groups.setdefault((_NUMBER.sub(_HOLE, shard.path), *what), []).append(shard)
    for (path, *_), group in groups.items():
        numbers = [tuple(map(int, _NUMBER.findall(shard.path))) for shard in group]
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if prod(map(len, columns)) == len(group):
            yield _named(path, columns), group
        else:
            for first, part in groupby(zip(numbers, group, strict=True), key=lambda pair: pair[0][:-1]):
                pairs = list(part)
                yield _named(path, [[n] for n in first] + [sorted(n[-1] for n, _ in pairs)]), [one for _, one in pairs]


def _named(path: str, columns: Sequence[Sequence[int]]) -> str:
    names = iter(columns)
    return re.sub(_HOLE, lambda _: _listed(next(names)), path)


def _listed(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as {0-2,5}; a single number as it is."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = (str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in runs_of(numbers))
    return "{" + ",".join(runs) + "}"


def _columns(sizes: Sequence[int], few: bool) -> list[str]:
    return [size(number) for number in (sizes if few else (min(sizes), max(sizes)))]
