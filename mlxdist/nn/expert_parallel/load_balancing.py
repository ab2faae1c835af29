"""Experts that are chosen about equally often, without an auxiliary loss; and how many tokens each got.

Loss-free balancing (Wang et al. 2024, arXiv:2408.15664; used in DeepSeek-V3, arXiv:2412.19437): each expert has a bias
that is added to its score where the top k are chosen, and only there. After each training step

    bias += rate * sign(mean count - count)

with the counts of all ranks added up, so that all ranks hold bitwise the same bias.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_sum

from ..rank_checks import agreed
from .fp8 import dtype_name

__all__ = ["BalanceBias", "ExpertLoad", "count_experts"]


class ExpertLoad:
    """How many tokens each expert got, in one step or many: ``counts``, one number per expert.

    ``owners``: the rank of each expert, for :attr:`per_rank`; ``None`` if it does not matter. Raises InvalidArgument
    where there is not one owner per expert.
    """

    def __init__(self, counts: Iterable[int], owners: Iterable[int] | None = None) -> None:
        self.counts = np.array(list(counts), np.int64)
        self.owners = None if owners is None else np.array(list(owners), np.int64)
        if self.owners is not None and self.owners.shape != self.counts.shape:
            raise InvalidArgument(
                f"ExpertLoad: {len(self.counts)} experts, but owners of {len(self.owners)}; name one rank per expert"
            )

    @property
    def total(self) -> int:
        """Tokens times the experts that each of them chose."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """The mean of the counts; 0 without experts."""
        return self.total / max(1, len(self.counts))

    @property
    def imbalance(self) -> float:
        """The largest count over the mean: 1 if all are equal, also if no token came; at most the number of experts."""
        return float(self.counts.max() / self.mean) if self.total else 1.0

    @property
    def idle(self) -> int:
        """Experts that no token came to."""
        return int((self.counts == 0).sum())

    @property
    def per_rank(self) -> np.ndarray | None:
        """How many tokens the experts of each rank got together, int64; ``None`` without owners."""
        return None if self.owners is None else np.bincount(self.owners, self.counts).astype(np.int64)

    def __add__(self, other: ExpertLoad) -> ExpertLoad:
        """The load of both steps together. Raises InvalidArgument for another number of experts."""
        if self.counts.shape != other.counts.shape:
            raise InvalidArgument(
                f"ExpertLoad: the loads of {len(self.counts)} and of {len(other.counts)} experts have no sum"
            )
        return ExpertLoad(self.counts + other.counts, self.owners)

    def __str__(self) -> str:
        """A table: the experts, the most loaded first."""
        lines = [
            f"{self.total} tokens for {len(self.counts)} experts: {self.mean:.1f} on average, largest over mean "
            f"{self.imbalance:.2f}, {self.idle} idle"
        ]
        if (per_rank := self.per_rank) is not None:
            lines.append("per rank: " + ", ".join(f"{rank}: {count}" for rank, count in enumerate(per_rank)))
        lines.append("expert  " + ("" if self.owners is None else "rank  ") + "    tokens  times mean")
        for expert in np.argsort(-self.counts, kind="stable"):
            rank = "" if self.owners is None else f"{self.owners[expert]:>4}  "
            count = self.counts[expert]
            lines.append(f"{expert:>6}  {rank}{count:>10}  {count / self.mean if self.total else 0:>10.2f}")
        return "\n".join(lines)


class BalanceBias:
    """The bias of each expert, and what it does to a router.

        scores = mx.sigmoid(x @ router)                     # or softmax
        indices, weights = balance.choose(scores, top_k=8)  # in the forward pass
        load = balance.update(indices)                      # once per training step, on all ranks

    :attr:`bias`, float32 of shape (experts,), belongs in checkpoints, and into mlx-lm's ``e_score_correction_bias``.

    Args:
        experts: how many there are, on all ranks together.
        rate: the step of the bias. The paper uses 0.001 with scores of a sigmoid.
        owners: the rank of each expert, for :attr:`ExpertLoad.per_rank`.
        group: the ranks whose tokens are counted; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: on all ranks: ``experts`` or ``rate`` is not positive.
        Mismatch: on all ranks: they have other ``experts`` or ``rate``.
    """

    def __init__(
        self, experts: int, rate: float = 1e-3, *, owners: Iterable[int] | None = None, group: GroupLike | None = None
    ) -> None:
        self._group = group_of(group)
        with agreed("BalanceBias", self._group, {"experts": experts, "rate": rate}):
            if experts < 1 or not 0 < rate < float("inf"):
                raise InvalidArgument(f"BalanceBias: experts ({experts}) and rate ({rate}) must be positive")
        self.bias = mx.zeros((experts,))
        self.rate = rate
        self.load = ExpertLoad([0] * experts, owners)  # of all updates together

    def choose(self, scores: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
        """The ``top_k`` experts of each token by score and bias, and their scores without bias.

        ``scores`` have shape (..., experts). Returns indices, uint32 of shape (..., top_k), in no order, and their
        scores, in the dtype of ``scores``, whose gradient is that of the scores. Normalize them as the model does.

        Raises:
            InvalidArgument: ``scores`` is not for these experts, or there are fewer than ``top_k``.
        """
        experts = self.bias.size
        if scores.ndim == 0 or scores.shape[-1] != experts:
            raise InvalidArgument(f"BalanceBias.choose: scores have shape {scores.shape}, expected (..., {experts})")
        if not 1 <= top_k <= experts:
            raise InvalidArgument(f"BalanceBias.choose: top_k is {top_k}, but there are {experts} experts")
        biased = mx.stop_gradient(scores) + self.bias
        indices = mx.argpartition(biased, kth=-top_k, axis=-1)[..., -top_k:].astype(mx.uint32)
        return indices, mx.take_along_axis(scores, indices, axis=-1)

    def update(self, indices: mx.array) -> ExpertLoad:
        """Moves the bias by what all ranks' tokens chose, and returns the load of this step, on all ranks.

        ``indices`` are what `choose` returned in this step: integers of any shape, also empty. All ranks call it, each
        with its own: one ``all_sum`` of a number per expert, which is waited for.

        Raises:
            InvalidArgument: indices that are no expert, on any rank: raised on all of them, and nothing is changed.
                Indices that are not integers are rejected on the rank that has them.
        """
        counts = count_experts(indices, self.bias.size)
        own = mx.concatenate([counts, (indices.size - counts.sum())[None]])
        *counted, strangers = np.array(all_sum(own, group=self._group)).tolist()
        if strangers:
            raise InvalidArgument(
                f"BalanceBias.update: {strangers} indices of all ranks together are not from 0 to {self.bias.size - 1}"
            )
        load = ExpertLoad(counted, self.load.owners)
        # In whole numbers up to the sign, so that a count that is the mean has no step.
        direction = np.sign(load.total - load.counts * len(counted)).astype(np.float32)
        self.bias = self.bias + mx.array(np.float32(self.rate) * direction)
        self.load = self.load + load
        return load


def count_experts(indices: mx.array, experts: int) -> mx.array:
    """How often each of ``experts`` is among the indices: int64 of shape (experts,). Lazy; others are not counted.

    Raises InvalidArgument for ``indices`` that are not integers.
    """
    if not mx.issubdtype(indices.dtype, mx.integer):
        raise InvalidArgument(f"count_experts: indices are integers, not {dtype_name(indices.dtype)}")
    return (indices.reshape(-1, 1) == mx.arange(experts)).sum(axis=0).astype(mx.int64)
