"""Data-parallel training that communicates while it computes: gradients leave in the order of the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
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
from mlxdist.runtime.arguments import group_of
from mlxdist.runtime.group import Group
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.native import bridge

from . import micro_batches
from .gradient_averaging import NAME, Averaging, GradientChannel, Parameters, reduced_over
from .gradient_buckets import DEFAULT_BUCKET_BYTES, check_reduce_dtype, sum_dtype

__all__ = ["value_and_grad"]

_DATA_AXES = ("dp", "fsdp", "cp")  # along which ranks have other data, so other gradients of the same parameters


def value_and_grad(
    model: nn.Module,
    fn: Callable[..., Any],
    *,
    group: Group | None = None,
    mesh: Mesh | None = None,
    accumulate: int = 1,
    all_reduce_size: int = DEFAULT_BUCKET_BYTES,
    reduce_dtype: mx.Dtype | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """MLX's ``nn.value_and_grad`` for ranks that have parts of a batch each: the gradients are those of all of it.

    Gradients are packed into buckets, and a bucket leaves when the backward pass has computed it, while that goes on
    (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704). The first call finds the order in which gradients become
    ready; all ranks take that of rank 0, until the trainable parameters change. n ranks send 2 (n - 1) / n of the
    bytes of the trainable parameters each, and in ``reduce_dtype``. Frozen parameters are not sent.

    Parameters of :func:`fully_shard` are averaged by it over its group, and here over the other axes of ``mesh`` alone.

    The call returns while it still computes, as ``mx.async_eval`` does. It cannot be inside ``mx.compile``; what
    ``fn`` calls can.

    Args:
        model: the trainable parameters have the same paths, shapes and dtypes on all ranks.
        fn: its result is the loss, the mean of this rank's batch; or a tuple of that and the number of tokens (or
            samples) which it is the mean of, as mlx-lm's ``default_loss`` returns it, and of anything else. (Under
            :func:`fully_shard` the loss of no tokens has to be a number, such as 0.) With
            tokens the gradients are those of the mean over the tokens of all ranks: ranks may have unequal shares,
            also none. That takes one more message of 4 bytes. Without, all ranks count the same.
        group: the ranks to average over; ``None``, without ``mesh``, is the group of ``mlxdist.init()``.
        mesh: instead of ``group``: averaged over its axes dp, fsdp and cp.
        accumulate: into how many micro-batches the arrays among the arguments are split, along their first axis. Their
            gradients are added up, those of 16 bits in float32, and averaged over the ranks with the last one.
        all_reduce_size: how many bytes share one message at most; 32 MiB by default. At 0, each leaf travels alone.
        reduce_dtype: in which gradients travel and are added up. ``None``: those of float16 and bfloat16 in float32,
            the others in their own.

    Returns:
        A function with the arguments of ``fn``. It returns what ``fn`` does for this rank's batch (of micro-batches:
        the mean loss, all tokens, and a list of each other value), and the gradients: a tree as
        ``model.trainable_parameters()``, bitwise the same on all ranks.

        It raises InvalidArgument, on all ranks, if in the first call ``fn`` fails on one, or the ranks' parameters
        differ; if arrays do not divide into micro-batches; if the tokens are not one number. What ``fn`` raises
        later on one rank ends the operations of all ranks: the others raise Aborted with its text.

    Raises:
        InvalidArgument: on all ranks: an argument is not what it should be on one of them, or they differ.
    """
    if mesh is not None and group is None:
        axes = {name: mesh[name] for name in _DATA_AXES if mesh.size(name) > 1}
        everyone = mesh[_DATA_AXES]
    else:
        everyone = group_of(group)
        axes = {"group": everyone} if everyone.size() > 1 else {}
    with agreed(NAME, everyone, accumulate, all_reduce_size, reduce_dtype):
        _check(model, fn, group is not None and mesh is not None, accumulate, all_reduce_size)
        check_reduce_dtype(NAME, reduce_dtype)
    averaging = Averaging(model, everyone, axes, mesh, all_reduce_size, reduce_dtype)

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _Step(averaging, fn, accumulate).run(args, kwargs)

    return call


class _Step:
    """One call: the micro-batches, then the average over the ranks."""

    def __init__(self, averaging: Averaging, fn: Callable[..., Any], accumulate: int) -> None:
        self._averaging, self._fn, self._count = averaging, fn, accumulate
        self._values: list[Any] = []
        self._kept = micro_batches.Kept()
        self._is_weighted = False
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
        facts: list[Any] = []
        if is_new:
            averaging.agree_on_unit(_elements(args, kwargs))
        with agreed(NAME, averaging.everyone, facts) if is_new else _ends_all(averaging.everyone):
            parts = micro_batches.split(NAME, self._count, args, kwargs)
            if is_new:
                found = averaging.gradients(parameters)
                # Shards differ between ranks, but not along the axes over which they are averaged here.
                axes = tuple(averaging.axes)
                facts += sorted((g.path, str(g.dtype), g.over, g.shape if g.over == axes else ()) for g in found)
                self._noted = []
            sums = self._differentiate(0, tree, parts[0])
            facts.append(self._is_weighted)
        if is_new:
            assert self._noted is not None
            never = set(range(len(found))).difference(self._noted)  # of what the loss does not depend on: at once
            averaging.agree_on_order(parameters, found, [*sorted(never), *self._noted])
            self._noted = None
        wide = [sum_dtype(array.dtype) for _, array in parameters]
        with _ends_all(averaging.everyone):
            for number in range(1, self._count):
                sums = {place: array.astype(wide[place]) for place, array in sums.items()}
                mx.async_eval(sums, _arrays(self._values[-1]), self._kept.gradients)
                for place, array in self._differentiate(number, tree, parts[number]).items():
                    sums[place] = sums[place] + array.astype(wide[place])
            if self._kept.gradients:
                raise InvalidArgument(
                    f"{NAME}: the last micro-batch leaves out a module of fully_shard(stage=1) that others called. "
                    "Its gradients travel with the last; take stage=2, or call it with each"
                )
        averages = iter(self._averaged(parameters, sums))
        return self._value(), tree_map(lambda _: next(averages), tree)

    def _differentiate(self, number: int, tree: Any, part: tuple[tuple, dict[str, Any]]) -> dict[int, mx.array]:
        """The gradients of a micro-batch, by number; times its tokens, if there are any."""
        model = self._averaging.model

        def loss(parameters: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[mx.array, Any]:
            model.update(parameters if self._noted is None else self._watched(parameters))
            value = self._fn(*args, **kwargs)
            if not isinstance(value, tuple):
                return value, value
            if len(value) < 2:
                raise InvalidArgument(f"{NAME}: fn returned a tuple of one; return the loss, or (loss, tokens)")
            share = _tokens(value[1]) / self._averaging.unit_of_tokens
            return value[0].astype(mx.float32) * share, value

        try:
            with micro_batches.working_on(self._kept, number, self._count):
                (_, value), gradients = mx.value_and_grad(loss)(tree, *part)
        finally:
            model.update(tree)
        self._values.append(value)
        found: Any = {place: array for place, (_, array) in enumerate(tree_flatten(gradients))}
        self._is_weighted = isinstance(value, tuple)
        if self._is_weighted:
            # The mean of no tokens is not a number, and nor is its gradient; a shard's has that of other ranks in it.
            counts = _tokens(value[1]) > 0
            shards = {path for path, _ in reduced_over(model)}
            flat: Any = tree_flatten(gradients)
            for place, (path, array) in enumerate(flat):
                if path not in shards:
                    found[place] = mx.where(counts, array, mx.zeros((), array.dtype))
        return found

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
            divisor = mx.divide(tokens, ranks * self._averaging.unit_of_tokens, stream=stream)
        waiting = _arrays(self._values)
        for bucket in plan.buckets:
            over: Any = bucket.over
            if not over:
                continue
            channel = averaging.channel(over)
            packed = plan.pack(bucket, sums).astype(bucket.wire_dtype)
            total = channel.add_up(packed, averaging.label(over, self._is_weighted))
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
        loss = mx.divide(sum(losses), sum(tokens)).astype(first[0].dtype)
        return (loss, total, *(list(others) for others in zip(*(value[2:] for value in self._values))))


@contextmanager
def _ends_all(everyone: Group) -> Iterator[None]:
    """An exception within ends the operations of all ranks, with its text: others may wait for this one's gradients."""
    try:
        yield
    except Exception as error:
        if everyone.size() > 1:
            everyone.abort(f"{NAME}: {type(error).__name__}: {error}")
        raise


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


def _check(model: Any, fn: Any, both: bool, accumulate: Any, all_reduce_size: Any) -> None:
    if both:
        raise InvalidArgument(f"{NAME}: give either group or mesh; a mesh says what its axes dp, fsdp and cp are")
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"{NAME}: model must be an nn.Module, not a {type(model).__name__}")
    if not callable(fn):
        raise InvalidArgument(f"{NAME}: fn must be a function that returns the loss, not a {type(fn).__name__}")
    if type(accumulate) is not int or accumulate < 1:
        raise InvalidArgument(f"{NAME}: accumulate is {accumulate!r}; give a number of micro-batches from 1")
    if type(all_reduce_size) is not int or all_reduce_size < 0:
        raise InvalidArgument(f"{NAME}: all_reduce_size is {all_reduce_size!r}; give a number of bytes from 0")
