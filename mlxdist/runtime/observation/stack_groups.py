"""The stacks of all ranks of a job, by what they have in common: most ranks of a job are at the same line."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mlxdist.base.errors import name_ranks

from ..diagnostics.stacks import Stacks

__all__ = ["StackGroup", "group_stacks", "odd_ones"]

_MAIN = "MainThread"


@dataclass(frozen=True)
class StackGroup:
    """A thread that is at the same line on these ranks, by the same calls; the most recent call first."""

    ranks: tuple[int, ...]
    thread: str
    calls: tuple[str, ...]


def group_stacks(stacks: Mapping[int, Stacks]) -> list[StackGroup]:
    """The groups of equal stacks, the main thread first, then the larger ones.

    Args:
        stacks: of each rank, those of its threads.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for rank, threads in sorted(stacks.items()):
        for thread, calls in threads.items():
            groups[thread, calls].append(rank)
    found = [StackGroup(tuple(ranks), *thread) for thread, ranks in groups.items()]
    return sorted(found, key=lambda group: (group.thread != _MAIN, group.thread, -len(group.ranks), group.ranks))


def odd_ones(groups: list[StackGroup]) -> list[str]:
    """Sentences on ranks whose main thread is elsewhere than that of most."""
    of_main = [group for group in groups if group.thread == _MAIN and group.calls]
    ranks = sum(len(group.ranks) for group in of_main)
    if not of_main or 2 * len(of_main[0].ranks) <= ranks or len(of_main[0].ranks) < 2:
        return []
    return [
        f"{name_ranks(group.ranks).capitalize()} {'is' if len(group.ranks) == 1 else 'are'} not where the others are, "
        f"but at {_first_difference(group, of_main[0])}."
        for group in of_main[1:]
    ]


def _first_difference(group: StackGroup, most: StackGroup) -> str:
    """The call, from the outermost on, in which a stack leaves that of most ranks."""
    pairs = zip(reversed(group.calls), reversed(most.calls))
    return next((mine for mine, theirs in pairs if mine != theirs), group.calls[0])
