"""Which rank holds which expert."""

from collections.abc import Sequence

import numpy as np

from ..partition import split_sizes

__all__ = ["Placement"]


class Placement:
    """Experts in their order, a run of neighbours on each rank.

    The runs are as equal as can be, the longer ones on the lower ranks, or in proportion to ``rank_shares``. Every rank
    holds an expert: one that holds none would wait for the others at every layer and only add messages.

    Args:
        num_experts: of the layer.
        ranks: of the expert-parallel group.
        rank_shares: one positive number per rank, for machines of unequal size.

    Raises:
        InvalidArgument: there are fewer experts than ranks, or ``rank_shares`` are not one positive number per rank;
            the same on every rank.
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

    def owner(self, expert: int) -> int:
        """The rank that holds ``expert``."""
        return int(self.owners[expert])

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
