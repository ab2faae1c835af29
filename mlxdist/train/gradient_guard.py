"""A guard against gradients that are not finite: one decision for all ranks, and the name of the parameter."""

import math
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxdist.base.errors import InvalidArgument, NonFinite, name_ranks
from mlxdist.nn.rank_checks import agreed, texts
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather

__all__ = ["GradientGuard"]

ACTIONS = ("skip", "stop")
_SHOWN_PARAMETERS = 3


class GradientGuard:
    """Keeps NaN and infinity out of the parameters: the same on all ranks, so that none updates alone.

    ::

        guard = mlxdist.train.GradientGuard()
        loss, gradients = step(batch)
        clipped, norm = clip_grad_norm(gradients, 1.0)
        if guard.check(gradients, norm=norm):
            optimizer.update(model, clipped)

    For a scaled loss there is :class:`MixedPrecision`, which skips such steps itself, and lowers the scale.

    Args:
        group: the ranks that decide together; ``None`` for that of ``mlxdist.init()``.
        action: "skip": ``check`` returns False, and the program leaves the update out. "stop": it raises.
        max_skips: steps in a row that are skipped at most; the next one raises. ``None`` for no limit.

    Attributes:
        skipped: steps that were skipped so far.
        report: the text about the last of them; empty for none.

    Raises:
        InvalidArgument: ``action`` or ``max_skips`` is wrong on a rank; on all ranks.
        Mismatch: they differ between ranks; on all ranks.
    """

    def __init__(
        self, *, group: GroupLike | None = None, action: Literal["skip", "stop"] = "skip", max_skips: int | None = 10
    ) -> None:
        self._group = group_of(group)
        with agreed("GradientGuard", self._group, action, max_skips):
            if action not in ACTIONS:
                raise InvalidArgument(f"GradientGuard: action is {action!r}, none of {', '.join(ACTIONS)}")
            if max_skips is not None and (type(max_skips) is not int or max_skips < 0):
                raise InvalidArgument(f"GradientGuard: max_skips is {max_skips!r}, not a number of steps from 0")
        self._max_skips = 0 if action == "stop" else max_skips
        self._in_a_row = 0
        self.skipped = 0
        self.report = ""

    def check(self, gradients: Any, *, norm: Any = None, loss: Any = None) -> bool:
        """Whether all gradients of all ranks are finite. Collective, and awaited: the same result on all ranks.

        Given ``norm``, a finite one is the result, without a communication and without reading a gradient. Otherwise
        each gradient is read once, and one all_gather of 8 bytes per rank follows; where gradients are not finite,
        one more names them.

        Gradients that are averaged already are not finite on any rank as soon as they are not on one; then ``loss``
        still shows where that began.

        Args:
            gradients: a tree of arrays, averaged or this rank's own; trees may differ between ranks. Not clipped ones:
                where the norm is NaN, clipping makes NaN of all of them.
            norm: of the gradients of all ranks, bitwise the same on all of them, such as that of ``clip_grad_norm``.
            loss: this rank's own, of one element.

        Raises:
            NonFinite: more than ``max_skips`` steps in a row were not finite, or ``action`` is "stop". On all ranks,
                with the first rank, and its first parameters in the order of the tree.
        """
        if norm is not None and math.isfinite(_value(norm)):
            self._in_a_row = 0
            return True
        flat: Any = tree_flatten(gradients)
        leaves = [(path, leaf) for path, leaf in flat if _is_inexact(leaf)]
        table = self._gather([leaf for _, leaf in leaves], loss)
        is_finite = not table.any() and norm is None
        self._in_a_row = 0 if is_finite else self._in_a_row + 1
        if is_finite:
            return True
        self.report = self._describe(leaves, table, norm)
        if self._max_skips is not None and self._in_a_row > self._max_skips:
            row = f" in {self._in_a_row} steps in a row" if self._in_a_row > 1 else ""
            raise NonFinite(f"gradients are not finite{row}: {self.report}")
        self.skipped += 1
        return False

    def _gather(self, leaves: list[mx.array], loss: Any) -> np.ndarray:
        """Returns, for each rank, how many of its gradients are not finite, and whether its loss is not. All gradients
        are evaluated before, and so are the collectives that have made them."""
        bad = _count(leaves) if leaves else mx.array(0, mx.int32)
        bad_loss = mx.array(False) if loss is None else mx.any(_is_bad(mx.array(loss)))
        return np.array(all_gather(mx.stack([bad, bad_loss.astype(mx.int32)])[None], group=self._group))

    def _describe(self, leaves: list[tuple[str, mx.array]], table: np.ndarray, norm: Any) -> str:
        own = "; ".join(_described(path, leaf) for path, leaf in _first(leaves, _SHOWN_PARAMETERS))
        found = texts(own, self._group)
        counts, losses = table[:, 0], table[:, 1]
        parts = []
        if losses.any():
            parts.append(f"the loss of {name_ranks(np.flatnonzero(losses).tolist())} is not finite")
        if counts.any():
            rank = int(np.argmax(counts > 0))
            others = int(np.count_nonzero(counts)) - 1
            more = f" (and on {others} more ranks)" if others else ""
            parts.append(f"{counts[rank]} gradients of rank {rank}{more}, the first: {found[rank]}")
        return ", ".join(parts) or f"their norm is {_value(norm)}, though each of them is finite"


def _value(norm: Any) -> float:
    value: Any = norm.item() if isinstance(norm, mx.array) else norm
    return float(value)


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and leaf.size > 0 and mx.issubdtype(leaf.dtype, mx.inexact)


def _is_bad(x: mx.array) -> mx.array:
    return mx.logical_not(mx.isfinite(x))


@mx.compile  # one kernel in place of four for each gradient
def _count(leaves: list[mx.array]) -> mx.array:
    return mx.sum(mx.stack([mx.any(_is_bad(leaf)) for leaf in leaves]).astype(mx.int32))


def _first(leaves: list[tuple[str, mx.array]], most: int) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = []
    for path, leaf in leaves:
        if len(found) < most and mx.any(_is_bad(leaf)).item():
            found.append((path, leaf))
    return found


def _described(path: str, leaf: mx.array) -> str:
    counts: dict[str, Any] = {"NaN": mx.sum(mx.isnan(leaf)).item(), "infinite": mx.sum(mx.isinf(leaf)).item()}
    kinds = [f"{count} {kind}" for kind, count in counts.items() if count]
    dtype = str(leaf.dtype).removeprefix("mlx.core.")
    return f"'{path}' {dtype} {list(leaf.shape)} has {' and '.join(kinds)} of {leaf.size} elements"
