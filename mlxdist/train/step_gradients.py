"""The gradients of a training step: of its micro-batches, added up, and averaged over the ranks.

Gradients leave in the order of the backward pass, while it goes on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.native import bridge

from . import gradient_accumulation
from .gradient_accumulation import MicroBatch
from .gradient_averaging import NAME, GradientChannel, Parameters
from .gradient_buckets import sum_dtype
from .step_loss import StepLoss

__all__ = ["GradientSums", "StepGradients"]


class GradientSums(Protocol):
    """How the gradients of the micro-batches of a step are computed and added up.

    ``prepare`` is called first, then ``sums``, then the others. Gradients have the numbers of the model's trainable
    parameters, in the order of their tree.

    Attributes:
        stage_losses: how often ``fn`` calls :func:`stage_loss`, from ``prepare`` on.
    """

    stage_losses: int

    def prepare(self, tree: Any, micro_batches: list[MicroBatch], is_new: bool) -> list[int]:
        """Calls ``fn`` with the first micro-batch, and ``tree``, the trainable parameters. No operation of the ranks
        is waited for.

        Returns:
            The numbers of the gradients in the order in which they are ready; of use where ``is_new``.

        Raises:
            InvalidArgument: ``fn`` returns no loss that the ranks can average.
        """

    def sums(self) -> dict[int, mx.array]:
        """The sums of the gradients over the micro-batches, by number."""

    def unfinished(self) -> list[mx.array]:
        """The arrays to evaluate together with the first gradients that leave."""

    def result(self) -> Any:
        """The result of ``fn`` for all micro-batches, as if they were one."""


class StepGradients:
    """A call of :func:`value_and_grad`: the sums over the micro-batches, then the average over the ranks."""

    def __init__(self, loss: StepLoss, sums: GradientSums) -> None:
        self._loss, self._sums, self._averaging = loss, sums, loss.averaging

    def run(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        averaging, loss = self._averaging, self._loss
        if bridge.traces():
            raise InvalidArgument(
                f"{NAME}: it evaluates, which mx.compile and mx.grad cannot trace; compile what fn calls, or take "
                "nn.value_and_grad and mlxdist.average_gradients"
            )
        tree = averaging.model.trainable_parameters()
        parameters: Any = tree_flatten(tree)
        is_new = not averaging.is_for(parameters)
        facts: dict[str, object] = {}
        if is_new:
            found = averaging.agree_on_parameters(parameters, gradient_accumulation.elements_of((args, kwargs)))
        with agreed(NAME, averaging.ranks, facts) if is_new else self._ends_all():
            micro_batches = gradient_accumulation.split(NAME, loss.micro_batches, args, kwargs)
            order = self._sums.prepare(tree, micro_batches, is_new)
            facts["number of calls of stage_loss"] = self._sums.stage_losses
            facts["result of fn"] = "(loss, tokens)" if loss.is_weighted else "a loss without tokens"
        if is_new:
            averaging.agree_on_order(parameters, found, order)
        with self._ends_all():
            sums = self._sums.sums()
            loss.require_complete()
        averages = iter(self._averaged(parameters, sums))
        return self._sums.result(), tree_map(lambda _: next(averages), tree)

    @contextmanager
    def _ends_all(self) -> Iterator[None]:
        """An exception within ends the operations of all ranks, with its text: others may wait for this one's
        gradients."""
        try:
            yield
        except Exception as error:
            if (ranks := self._averaging.ranks).size() > 1:
                ranks.abort(f"{NAME}: {type(error).__name__}: {error}")
            raise

    def _averaged(self, parameters: Parameters, sums: dict[int, mx.array]) -> list[mx.array]:
        """Averages the sums over micro-batches. Gradients leave as they are computed, while the rest is computed."""
        averaging, bucket_plan = self._averaging, self._averaging.bucket_plan
        assert bucket_plan is not None
        divisor, stream = self._divisor(), GradientChannel.stream
        unfinished = self._sums.unfinished()
        for bucket in bucket_plan.buckets:
            over: Any = bucket.over
            if not over:
                continue
            channel = averaging.channel(over)
            packed = bucket_plan.pack(bucket, sums).astype(bucket.wire_dtype)
            total = channel.add_up(packed, averaging.structure(over, self._loss.is_weighted))
            total = total.astype(bucket.sum_dtype, stream=stream)
            mean = mx.divide(total, divisor * channel.size, stream=stream)
            # MLX computes what is asked for, in the order of asking: the backward pass up to this bucket, and no more.
            mx.async_eval(mean, unfinished)
            unfinished = []
            bucket_plan.unpack(bucket, mean, sums)
        for place, gradient in enumerate(bucket_plan.gradients):
            if not gradient.over and (self._loss.is_weighted or self._loss.micro_batches > 1):
                sums[place] = (sums[place].astype(sum_dtype(gradient.dtype)) / divisor).astype(gradient.dtype)
        return [sums[place].astype(array.dtype) for place, (_, array) in enumerate(parameters)]

    def _divisor(self) -> Any:
        """The divisor of the ranks' mean of a sum over micro-batches: the number of micro-batches, or the units of
        tokens in a rank's mean share."""
        averaging, loss, stream = self._averaging, self._loss, GradientChannel.stream
        if not loss.is_weighted:
            return loss.micro_batches
        tokens, ranks = loss.tokens(), averaging.everyone.size()
        if ranks > 1:
            tokens = averaging.channel(tuple(averaging.axes)).add_up(tokens, 0)
            mx.async_eval(tokens)
        has_any = mx.greater(tokens, 0, stream=stream)  # otherwise gradients are zero
        tokens = mx.where(has_any, tokens, mx.ones((), tokens.dtype), stream=stream)
        return mx.divide(tokens, ranks * averaging.unit_of_tokens, stream=stream)
