"""Which rank holds which expert."""

from collections.abc import Sequence

import numpy as np

from mlxdist.runtime.group.group import Group

from ..layout.partition import split_sizes

__all__ = ["Placement", "wrong_index", "wrong_ranks"]


class Placement:
    """``num_experts`` in their order, a run of neighbours on each of ``ranks``.

    The runs are as equal as can be, the longer ones on the lower ranks, or in proportion to ``rank_shares``, one
    positive number per rank. Every rank holds an expert: one without would only add messages.

    Raises:
        InvalidArgument: there are fewer experts than ranks, or ``rank_shares`` do not fit; the same on every rank.
    """

    def __init__(self, num_experts: int, ranks: int, rank_shares: Sequence[float] | None = None) -> None:
        self.num_experts = num_experts
        self.ranks = ranks
        self.counts = split_sizes(
            "number of experts", num_experts, ranks, [1] * ranks if rank_shares is None else rank_shares
        )
        """Experts of each rank."""
        self.owners = np.repeat(np.arange(ranks, dtype=np.int32), self.counts)
        """The rank of each expert, int32 of shape (num_experts,)."""

    def local(self, rank: int) -> range:
        """The experts of ``rank``."""
        first = sum(self.counts[:rank])
        return range(first, first + self.counts[rank])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.counts == other.counts

    def __hash__(self) -> int:
        return hash(tuple(self.counts))

    def __repr__(self) -> str:
        return f"Placement({self.num_experts} experts on {self.ranks} ranks: {self.counts})"


def wrong_ranks(name: str, placement: Placement, group: Group) -> str | None:
    """The text of an error if the placement is for another number of ranks than ``group`` has, else ``None``."""
    if placement.ranks == group.size():
        return None
    return f"{name}: the placement is for {placement.ranks} ranks, but the group has {group.size()}"


def wrong_index(name: str, placement: Placement, selected: np.ndarray, least: int = 0) -> str | None:
    """The text of an error if one of ``selected``, integers from ``least`` on, is no expert; else ``None``."""
    if not selected.size or least <= selected.min() <= selected.max() < placement.num_experts:
        return None
    return f"{name} are from {selected.min()} to {selected.max()}, but the experts are 0 to {placement.num_experts - 1}"
