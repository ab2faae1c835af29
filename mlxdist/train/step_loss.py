"""The loss of a training step: the results of ``fn`` for its micro-batches, weighted by tokens if it counts them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from numbers import Real
from typing import Any

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.mappings import with_gradients

from . import gradient_accumulation
from .gradient_averaging import NAME, Averaging, paths_of_shards
from .model_outputs import outputs_through

__all__ = ["StepLoss"]


class StepLoss:
    """The function ``fn`` in one call of :func:`value_and_grad`, and its result for each micro-batch.

    Attributes:
        averaging: the averaging of the model's gradients.
        micro_batches: how many the step has.
        values: the results of ``fn``, one for each micro-batch.
        is_weighted: whether a result is (loss, tokens, ...).
    """

    def __init__(self, averaging: Averaging, fn: Callable[..., Any], micro_batches: int) -> None:
        self.averaging, self.fn, self.micro_batches = averaging, fn, micro_batches
        self.values: list[Any] = []
        self.is_weighted = False
        self._kept = gradient_accumulation.Kept()

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """The gradients of micro-batch ``number`` are computed within."""
        with gradient_accumulation.working_on(self._kept, number, self.micro_batches):
            yield

    @property
    def kept_gradients(self) -> dict[Any, mx.array]:
        """The sums that modules of :func:`fully_shard` keep for the last micro-batch, a copy."""
        return dict(self._kept.gradients)

    def require_complete(self) -> None:
        """Raises InvalidArgument: a module has kept gradients that the last micro-batch should have averaged."""
        if self._kept.gradients:
            raise InvalidArgument(
                f"{NAME}: the last micro-batch leaves out a module of fully_shard(stage=1) that others called. "
                "Its gradients travel with the last; take stage=2, or call it with each"
            )

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls fn. Backward, the cotangents of the model's outputs are zero where there are no tokens: the mean of no
        tokens is NaN, and it would reach the gradients of other ranks by way of what they communicate."""
        if not (self.averaging.is_context_parallel or self.averaging.has_shards):
            return self.fn(*args, **kwargs)
        value: Any = None

        def backward(cotangents: Sequence[mx.array]) -> list[mx.array]:
            if not isinstance(value, tuple):
                return list(cotangents)
            return [mx.where(_count(value[1]) > 0, one, mx.zeros((), one.dtype)) for one in cotangents]

        with outputs_through(self.averaging.model, lambda output: with_gradients(backward, [output])[0]):
            value = self.fn(*args, **kwargs)
        return value

    def weighted(self, value: Any) -> mx.array:
        """The loss that is differentiated, from a result of fn."""
        if not isinstance(value, tuple):
            return value
        if len(value) < 2:
            raise InvalidArgument(f"{NAME}: fn returned a tuple of one; return the loss, or (loss, tokens)")
        return value[0].astype(mx.float32) * (_count(value[1]) / self.averaging.unit_of_tokens)

    def counted(self, value: Any, gradients: dict[int, tuple[str, mx.array]]) -> dict[int, mx.array]:
        """Returns gradients, given with their paths: zero if there are no tokens, since the mean of none is NaN.

        The gradient of a shard contains those of other ranks, and so does each gradient where ranks share sequences:
        other ranks' targets attend to this rank's keys. These stay as they are; :meth:`call` has kept NaN out of them.
        """
        if not isinstance(value, tuple) or self.averaging.is_context_parallel:
            return {place: array for place, (_, array) in gradients.items()}
        counts = _count(value[1]) > 0
        shards = paths_of_shards(self.averaging.model)
        return {
            place: array if path in shards else mx.where(counts, array, mx.zeros((), array.dtype))
            for place, (path, array) in gradients.items()
        }

    def tokens(self) -> mx.array:
        """The tokens of all micro-batches of this rank, a float32 scalar, where ``is_weighted``."""
        total: Any = sum(_count(value[1]) for value in self.values)
        return total

    def result(self) -> Any:
        """The result of fn for all micro-batches, as if they were one."""
        first = self.values[0]
        if self.micro_batches == 1:
            return first
        if not self.is_weighted:
            return sum(self.values) / self.micro_batches
        tokens = [_count(value[1]) for value in self.values]
        losses = [mx.where(n > 0, value[0] * n, 0) for n, value in zip(tokens, self.values)]
        total = sum(value[1] for value in self.values)
        counted: Any = sum(tokens)
        loss = mx.divide(sum(losses), mx.where(counted > 0, counted, 1)).astype(first[0].dtype)  # 0 of no tokens
        return (loss, total, *(list(others) for others in zip(*(value[2:] for value in self.values))))


def _count(tokens: Any) -> mx.array:
    if isinstance(tokens, mx.array) and tokens.size == 1:
        return mx.stop_gradient(tokens.reshape(()).astype(mx.float32))
    if isinstance(tokens, Real) and 0 <= float(tokens) < inf:
        return mx.array(float(tokens), mx.float32)
    shown = f"an array of shape {tokens.shape}" if isinstance(tokens, mx.array) else repr(tokens)
    raise InvalidArgument(
        f"{NAME}: fn returned {shown} behind the loss; return (loss, tokens, ...), where tokens is the number of "
        "tokens or samples that the loss is the mean of"
    )
