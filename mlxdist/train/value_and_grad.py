"""Data-parallel training that communicates while it computes: gradients leave in the order of the backward pass."""

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import wraps
from itertools import count
from math import inf, prod
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.mappings import with_gradients
from mlxdist.nn.rank_checks import agree, agreed
from mlxdist.runtime.arguments import group_of
from mlxdist.runtime.group import Group
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.native import bridge

from . import micro_batches
from .gradient_buckets import DEFAULT_BUCKET_BYTES, Gradient, Plan, check_reduce_dtype, sum_dtype

__all__ = ["value_and_grad"]

_NAME = "value_and_grad"
Parameters = list[tuple[str, mx.array]]
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
        differ; if arrays do not divide into micro-batches; if the tokens are not one number.

    Raises:
        InvalidArgument: on all ranks: an argument is not what it should be on one of them, or they differ.
    """
    if mesh is not None and group is None:
        axes = {name: mesh[name] for name in _DATA_AXES if mesh.size(name) > 1}
        everyone = mesh[_DATA_AXES]
    else:
        everyone = group_of(group)
        axes = {"group": everyone} if everyone.size() > 1 else {}
    with agreed(_NAME, everyone, accumulate, all_reduce_size, reduce_dtype):
        _check(model, fn, group is not None and mesh is not None, accumulate, all_reduce_size)
        check_reduce_dtype(_NAME, reduce_dtype)
    averaging = _Averaging(model, everyone, axes, mesh, all_reduce_size, reduce_dtype)

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _Step(averaging, fn, accumulate).run(args, kwargs)

    return call


class _Averaging:
    """What stays from step to step: in which buckets the gradients of a model travel, and to which ranks."""

    def __init__(
        self,
        model: nn.Module,
        everyone: Group,
        axes: dict[str, Group],
        mesh: Mesh | None,
        all_reduce_size: int,
        reduce_dtype: mx.Dtype | None,
    ) -> None:
        self.model, self.everyone = model, everyone
        self.plan: Plan | None = None
        self.axes, self._mesh = axes, mesh
        self._all_reduce_size, self._reduce_dtype = all_reduce_size, reduce_dtype
        self._labels: dict[tuple, int] = {}
        self._known: list[tuple] = []  # of the parameters that the plan is of
        # Tokens are counted in units of about a batch: a float16 gradient of a sum over all would overflow. It is
        # a power of two, so no digit of the result depends on it.
        self.unit_of_tokens = 1.0

    def is_for(self, parameters: Parameters) -> bool:
        """Whether the plan is of these parameters."""
        return self.plan is not None and self._known == _described(parameters)

    def gradients(self, parameters: Parameters) -> list[Gradient]:
        """Raises InvalidArgument: one is averaged already over ranks that are no axis of the mesh."""
        reduced = dict(_reduced_over(self.model))
        found = []
        for path, array in parameters:
            groups = [group for group in reduced.get(path, ()) if group.size() > 1]
            if any(group not in self.axes.values() for group in groups):
                raise InvalidArgument(
                    f"{_NAME}: '{path}' is averaged over another group by fully_shard; give both the same mesh or group"
                )
            over = tuple(name for name, group in self.axes.items() if group not in groups)
            found.append(Gradient(path, tuple(array.shape), array.dtype, over))
        return found

    def agree_on_unit(self, elements: int) -> None:
        """``elements``: of this rank's batch. Collective."""
        most = agree(_NAME, self.everyone, None, {}, [elements]).max()
        self.unit_of_tokens = float(2 ** int(most).bit_length())

    def agree_on_order(self, parameters: Parameters, gradients: list[Gradient], order: list[int]) -> None:
        """Makes the plan, of rank 0's order. Collective."""
        order = agree(_NAME, self.everyone, None, {}, order)[0].tolist()
        self.plan = Plan(gradients, order, self._all_reduce_size, self._reduce_dtype)
        self._labels.clear()
        self._known = _described(parameters)

    def label(self, over: tuple[str, ...], is_weighted: bool) -> int:
        """Of the messages: :meth:`Plan.label`."""
        if (over, is_weighted) not in self._labels:
            assert self.plan is not None
            self._labels[over, is_weighted] = self.plan.label(is_weighted, over=over)
        return self._labels[over, is_weighted]

    def channel(self, over: tuple[str, ...]) -> "_Channel":
        """Of the ranks along these axes."""
        return _Channel.of(self._mesh[over] if self._mesh is not None else self.everyone)


class _Step:
    """One call: the micro-batches, then the average over the ranks."""

    def __init__(self, averaging: _Averaging, fn: Callable[..., Any], accumulate: int) -> None:
        self._averaging, self._fn, self._count = averaging, fn, accumulate
        self._unit_of_tokens = averaging.unit_of_tokens  # that of the whole step: the first one finds another
        self._values: list[Any] = []
        self._is_weighted = False
        self._noted: list[int] | None = None

    def run(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        averaging, model = self._averaging, self._averaging.model
        if bridge.traces():
            raise InvalidArgument(
                f"{_NAME}: it evaluates, which mx.compile and mx.grad cannot trace; compile what fn calls, or take "
                "nn.value_and_grad and mlxdist.average_gradients"
            )
        tree = model.trainable_parameters()
        parameters: Any = tree_flatten(tree)
        is_new = not averaging.is_for(parameters)
        facts: list[Any] = []
        if is_new:
            averaging.agree_on_unit(_elements(args, kwargs))
        with agreed(_NAME, averaging.everyone, facts) if is_new else nullcontext():
            parts = micro_batches.split(_NAME, self._count, args, kwargs)
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
        for number in range(1, self._count):
            sums = {place: array.astype(wide[place]) for place, array in sums.items()}
            mx.async_eval(sums, _arrays(self._values[-1]))
            for place, array in self._differentiate(number, tree, parts[number]).items():
                sums[place] = sums[place] + array.astype(wide[place])
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
                raise InvalidArgument(f"{_NAME}: fn returned a tuple of one; return the loss, or (loss, tokens)")
            share = _tokens(value[1]) / self._unit_of_tokens
            return value[0].astype(mx.float32) * share, value

        try:
            with micro_batches.working_on(number, self._count):
                (_, value), gradients = mx.value_and_grad(loss)(tree, *part)
        finally:
            model.update(tree)
        self._values.append(value)
        found: Any = {place: array for place, (_, array) in enumerate(tree_flatten(gradients))}
        self._is_weighted = isinstance(value, tuple)
        if self._is_weighted:
            # The mean of no tokens is not a number, and nor is its gradient; a shard's has that of other ranks in it.
            counts = _tokens(value[1]) > 0
            shards = {path for path, _ in _reduced_over(model)}
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
        stream = _Channel.stream
        if self._is_weighted:
            tokens: Any = sum(_tokens(value[1]) for value in self._values)
            if ranks > 1:
                tokens = averaging.channel(tuple(averaging.axes)).add_up(tokens, 0)
                mx.async_eval(tokens)
            divisor = mx.divide(tokens, ranks * self._unit_of_tokens, stream=stream)
        waiting = _arrays(self._values)
        for bucket in plan.buckets:
            over: Any = bucket.over
            if not over:
                continue
            channel = averaging.channel(over)
            packed = plan.pack(bucket, sums).astype(bucket.wire_dtype)
            total = channel.add_up(packed, averaging.label(over, self._is_weighted))
            total = total.astype(bucket.sum_dtype, stream=stream)
            mean = mx.divide(total, divisor * channel.ranks, stream=stream)
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


class _Channel:
    """A group, and the stream, that gradients travel in and nothing else: while others are computed.

    What the program does in its own group is in another order on each stream, and each group has one order.
    """

    stream = mx.new_thread_local_stream(mx.cpu)
    _of: "WeakKeyDictionary[Group, _Channel]" = WeakKeyDictionary()

    def __init__(self, group: Group) -> None:
        own = group.split(0)
        assert own is not None  # the color is not negative
        self._group, self.ranks = own, group.size()

    @classmethod
    def of(cls, group: Group) -> "_Channel":
        """Collective where the group has none yet."""
        if group not in cls._of:
            cls._of[group] = cls(group)
        return cls._of[group]

    def add_up(self, array: mx.array, label: int) -> mx.array:
        """The sum of all ranks' ``array``; Mismatch, when it is evaluated, if they have other labels."""
        return mx.distributed.all_sum(array, group=self._group.connection.mlx_group(-1.0, label), stream=self.stream)


def _reduced_over(model: nn.Module) -> Iterator[tuple[str, Collection[Group]]]:
    """The groups over which the gradient that ``mx.grad`` gives for a parameter is the mean already, by its path.

    ``reduced_over`` of the innermost module that has it, as those of :func:`fully_shard`.
    """
    owners = {
        path: vars(module)["reduced_over"] for path, module in model.named_modules() if "reduced_over" in vars(module)
    }
    parameters: Any = tree_flatten(model.trainable_parameters())
    for path, _ in parameters:
        names = path.split(".")
        prefixes = (".".join(names[:length]) for length in range(len(names) - 1, -1, -1))
        if (owner := next((prefix for prefix in prefixes if prefix in owners), None)) is not None:
            yield path, owners[owner]


def _described(parameters: Parameters) -> list[tuple]:
    return [(path, array.shape, array.dtype) for path, array in parameters]


def _tokens(tokens: Any) -> mx.array:
    if isinstance(tokens, mx.array) and tokens.size == 1:
        return mx.stop_gradient(tokens.reshape(()).astype(mx.float32))
    if isinstance(tokens, Real) and 0 <= float(tokens) < inf:
        return mx.array(float(tokens), mx.float32)
    shown = f"an array of shape {tokens.shape}" if isinstance(tokens, mx.array) else repr(tokens)
    raise InvalidArgument(
        f"{_NAME}: fn returned {shown} behind the loss; return (loss, tokens, ...), where tokens is the number of "
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
        raise InvalidArgument(f"{_NAME}: give either group or mesh; a mesh says what its axes dp, fsdp and cp are")
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"{_NAME}: model must be an nn.Module, not a {type(model).__name__}")
    if not callable(fn):
        raise InvalidArgument(f"{_NAME}: fn must be a function that returns the loss, not a {type(fn).__name__}")
    if type(accumulate) is not int or accumulate < 1:
        raise InvalidArgument(f"{_NAME}: accumulate is {accumulate!r}; give a number of micro-batches from 1")
    if type(all_reduce_size) is not int or all_reduce_size < 0:
        raise InvalidArgument(f"{_NAME}: all_reduce_size is {all_reduce_size!r}; give a number of bytes from 0")
