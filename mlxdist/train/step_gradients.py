"""The gradients of a training step: of its micro-batches, added up, and averaged over the ranks.

Gradients leave in the order of the backward pass, while it goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf, prod
from numbers import Real
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.mappings import with_gradients
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.native import bridge

from . import gradient_accumulation
from .gradient_averaging import NAME, Averaging, GradientChannel, Parameters, paths_of_shards
from .gradient_buckets import sum_dtype
from .lost_terms import check_shards
from .model_outputs import outputs_through

__all__ = ["Part", "StepGradients"]

Part = tuple[tuple, dict[str, Any]]  # the arguments of a micro-batch


class StepGradients:
    """One call of :func:`value_and_grad`: the micro-batches, then the average over the ranks."""

    def __init__(self, averaging: Averaging, fn: Callable[..., Any], accumulate: int) -> None:
        self._averaging, self._fn, self._count = averaging, fn, accumulate
        self._values: list[Any] = []
        self._kept = gradient_accumulation.Kept()
        self._is_weighted = False
        self._terms = 0  # of stage_loss
        self._noted: list[int] | None = None

    def run(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        averaging, model = self._averaging, self._averaging.model
        if bridge.traces():
            raise InvalidArgument(
                f"{NAME}: it evaluates, which mx.compile and mx.grad cannot trace; compile what fn calls, or take "
                "nn.value_and_grad and mlxdist.average_gradients"
            )
        tree = model.trainable_parameters()
        parameters: Any = tree_flatten(tree)
        is_new = not averaging.is_for(parameters)
        facts: dict[str, object] = {}
        if is_new:
            found = averaging.agree_on_parameters(parameters, _elements(args, kwargs))
        with agreed(NAME, averaging.ranks, facts) if is_new else self._ends_all():
            parts = gradient_accumulation.split(NAME, self._count, args, kwargs)
            order = self._begin(tree, parts, is_new)
            facts["number of calls of stage_loss"] = self._terms
            facts["result of fn"] = "(loss, tokens)" if self._is_weighted else "a loss without tokens"
        if is_new:
            averaging.agree_on_order(parameters, found, order)
        with self._ends_all():
            sums = self._sums(tree, parts)
            if self._kept.gradients:
                raise InvalidArgument(
                    f"{NAME}: the last micro-batch leaves out a module of fully_shard(stage=1) that others called. "
                    "Its gradients travel with the last; take stage=2, or call it with each"
                )
        averages = iter(self._averaged(parameters, sums))
        return self._value(), tree_map(lambda _: next(averages), tree)

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

    def _begin(self, tree: Any, parts: list[Part], is_new: bool) -> list[int]:
        """The first micro-batch; the numbers of the gradients in the order in which they are ready, if it is new."""
        self._noted = [] if is_new else None
        self._first = self._differentiate(0, tree, parts[0])
        if is_new and self._is_weighted and self._averaging.has_shards:
            args, kwargs = parts[0]
            check_shards(self._averaging.model, lambda: self._weighted(self._fn(*args, **kwargs)))
        noted, self._noted = self._noted or [], None
        never = set(range(len(self._first))).difference(noted)  # of what the loss does not depend on: at once
        return [*sorted(never), *noted]

    def _sums(self, tree: Any, parts: list[Part]) -> dict[int, mx.array]:
        """The gradients of all micro-batches, added up, by number."""
        sums = self._first
        for number in range(1, self._count):
            sums = {place: array.astype(sum_dtype(array.dtype)) for place, array in sums.items()}
            mx.async_eval(sums, _arrays(self._values[-1]), self._kept.gradients)
            for place, array in self._differentiate(number, tree, parts[number]).items():
                sums[place] = sums[place] + array.astype(sums[place].dtype)
        return sums

    def _differentiate(self, number: int, tree: Any, part: Part) -> dict[int, mx.array]:
        """The gradients of a micro-batch, by number; times its tokens, if there are any."""
        model = self._averaging.model

        def loss(parameters: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[mx.array, Any]:
            model.update(parameters if self._noted is None else self._watched(parameters))
            value = self._called(args, kwargs)
            return self._weighted(value), value

        try:
            with gradient_accumulation.working_on(self._kept, number, self._count):
                (_, value), gradients = mx.value_and_grad(loss)(tree, *part)
        finally:
            model.update(tree)
        self._values.append(value)
        self._is_weighted = isinstance(value, tuple)
        flat: Any = tree_flatten(gradients)
        return self._counted(value, dict(enumerate(flat)))

    def _called(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What fn returns. Backward, the cotangents of the model's outputs are zero where there are no tokens: the mean
        of none is not a number, and it would reach the gradients of other ranks by way of what they communicate."""
        if not (self._averaging.is_context_parallel or self._averaging.has_shards):
            return self._fn(*args, **kwargs)
        value: Any = None

        def backward(cotangents: Sequence[mx.array]) -> list[mx.array]:
            if not isinstance(value, tuple):
                return list(cotangents)
            return [mx.where(_tokens(value[1]) > 0, one, mx.zeros((), one.dtype)) for one in cotangents]

        with outputs_through(self._averaging.model, lambda output: with_gradients(backward, [output])[0]):
            value = self._fn(*args, **kwargs)
        return value

    def _weighted(self, value: Any) -> mx.array:
        """The loss that is differentiated, of what fn has returned."""
        if not isinstance(value, tuple):
            return value
        if len(value) < 2:
            raise InvalidArgument(f"{NAME}: fn returned a tuple of one; return the loss, or (loss, tokens)")
        return value[0].astype(mx.float32) * (_tokens(value[1]) / self._averaging.unit_of_tokens)

    def _counted(self, value: Any, gradients: dict[int, tuple[str, mx.array]]) -> dict[int, mx.array]:
        """Gradients, which come with their paths: zero if there are no tokens, since the mean of none is not a number.

        A shard's has that of other ranks in it, and so has each gradient where ranks share sequences: other ranks'
        targets attend to this one's keys. There :meth:`_called` has left out what is not a number.
        """
        if not isinstance(value, tuple) or self._averaging.is_context_parallel:
            return {place: array for place, (_, array) in gradients.items()}
        counts = _tokens(value[1]) > 0
        shards = paths_of_shards(self._averaging.model)
        return {
            place: array if path in shards else mx.where(counts, array, mx.zeros((), array.dtype))
            for place, (path, array) in gradients.items()
        }

    def _watched(self, parameters: Any) -> Any:
        """The parameters. Backward: their places are noted in the order in which their gradients are ready."""

        def watch(place: int, array: mx.array) -> mx.array:
            def note(cotangents: Any) -> Any:
                if self._noted is not None and place not in self._noted:
                    self._noted.append(place)
                return cotangents

            return with_gradients(note, [array])[0]

        places = count()
        return tree_map(lambda array: watch(next(places), array), parameters)

    def _averaged(self, parameters: Parameters, sums: dict[int, mx.array]) -> list[mx.array]:
        """The sums over micro-batches, averaged. What has been computed leaves while the rest is computed."""
        averaging, plan, ranks = self._averaging, self._averaging.plan, self._averaging.everyone.size()
        assert plan is not None
        divisor: Any = self._count
        stream = GradientChannel.stream
        if self._is_weighted:
            tokens: Any = sum(_tokens(value[1]) for value in self._values)
            if ranks > 1:
                tokens = averaging.channel(tuple(averaging.axes)).add_up(tokens, 0)
                mx.async_eval(tokens)
            has_any = mx.greater(tokens, 0, stream=stream)  # otherwise gradients are zero
            tokens = mx.where(has_any, tokens, mx.ones((), tokens.dtype), stream=stream)
            divisor = mx.divide(tokens, ranks * self._averaging.unit_of_tokens, stream=stream)
        waiting = self._waiting()
        for bucket in plan.buckets:
            over: Any = bucket.over
            if not over:
                continue
            channel = averaging.channel(over)
            packed = plan.pack(bucket, sums).astype(bucket.wire_dtype)
            total = channel.add_up(packed, averaging.structure(over, self._is_weighted))
            total = total.astype(bucket.sum_dtype, stream=stream)
            mean = mx.divide(total, divisor * channel.size, stream=stream)
            # MLX computes what is asked for, in the order of asking: the backward pass up to this bucket, and no more.
            mx.async_eval(mean, waiting)
            waiting = []
            plan.unpack(bucket, mean, sums)
        for place, gradient in enumerate(plan.gradients):
            if not gradient.over and (self._is_weighted or self._count > 1):
                sums[place] = (sums[place].astype(sum_dtype(gradient.dtype)) / divisor).astype(gradient.dtype)
        return [sums[place].astype(array.dtype) for place, (_, array) in enumerate(parameters)]

    def _waiting(self) -> list[mx.array]:
        """What the first bucket brings along."""
        return _arrays(self._values)

    def _value(self) -> Any:
        """What fn returned, of all micro-batches as of one."""
        first = self._values[0]
        if self._count == 1:
            return first
        if not self._is_weighted:
            return sum(self._values) / self._count
        tokens = [_tokens(value[1]) for value in self._values]
        losses = [mx.where(n > 0, value[0] * n, 0) for n, value in zip(tokens, self._values)]
        total = sum(value[1] for value in self._values)
        counted: Any = sum(tokens)
        loss = mx.divide(sum(losses), mx.where(counted > 0, counted, 1)).astype(first[0].dtype)  # 0 of no tokens
        return (loss, total, *(list(others) for others in zip(*(value[2:] for value in self._values))))


def _tokens(tokens: Any) -> mx.array:
    if isinstance(tokens, mx.array) and tokens.size == 1:
        return mx.stop_gradient(tokens.reshape(()).astype(mx.float32))
    if isinstance(tokens, Real) and 0 <= float(tokens) < inf:
        return mx.array(float(tokens), mx.float32)
    shown = f"an array of shape {tokens.shape}" if isinstance(tokens, mx.array) else repr(tokens)
    raise InvalidArgument(
        f"{NAME}: fn returned {shown} behind the loss; return (loss, tokens, ...), where tokens is the number of "
        "tokens or samples that the loss is the mean of"
    )


def _arrays(tree: Any) -> list[mx.array]:
    flat: Any = tree_flatten(tree)
    return [leaf for _, leaf in flat if isinstance(leaf, mx.array)]


def _elements(args: tuple, kwargs: dict[str, Any]) -> int:
    """Of the largest array that is an argument. Models are none."""
    leaves: Any = tree_flatten([list(args), kwargs], is_leaf=lambda node: isinstance(node, nn.Module))
    return max((prod(leaf.shape) for _, leaf in leaves if isinstance(leaf, mx.array)), default=1)
