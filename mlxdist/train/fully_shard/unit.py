"""A unit of fully_shard: parameters that one message gathers where a module is called, and that are free after it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import accumulate, pairwise
from math import prod
from operator import itemgetter
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxdist.nn.interception import with_classes
from mlxdist.nn.mappings import with_gradients
from mlxdist.nn.models.plan.parallel_region import repeated
from mlxdist.runtime.group.channel import Channel
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.label import label_scope
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.collectives import all_gather, all_sum, sum_scatter
from mlxdist.runtime.operations.ordering import Order
from mlxdist.runtime.operations.packing import pack, unpack

from .. import gradient_accumulation
from .flat_shards import FlatShards, Slot

__all__ = ["METHODS", "Unit", "UnitChannel"]

Arrays = list[mx.array]
Tree = Any
Weight = tuple[int, int, Slot]  # a parameter of a leaf: the number of its vector, its place in that, and itself
# What is computed with the parameters of a module: MLX's own fully_shard knows these two, too.
METHODS = ("__call__", "as_linear")
_TREES = (list, tuple, dict)
_SMALL = 1 / 256  # of the elements of a unit: what a leaf has that stays gathered from the forward to the backward pass


class UnitChannel(Channel):
    """A channel for the parameters and gradients of units."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.gather = partial(all_gather, group=self.group, stream=self.stream)
        self.scatter = partial(sum_scatter, group=self.group, stream=self.stream)
        self.add_up = partial(all_sum, group=self.group, stream=self.stream)


class UnitOrder(Order):
    """The order in which the units of a model communicate: that of the calls and of their gradients. MLX's own order
    would not do, since the graph depends on the shapes of this rank's batch."""

    current: ContextVar["UnitOrder | None"] = ContextVar("current", default=None)
    latest: Callable[[], "UnitOrder | None"] = lambda: None  # weak: of what is not evaluated yet

    def __init__(self) -> None:
        super().__init__(UnitChannel.stream)
        self._traced: Any = None
        self.last_pass: Callable[[], _Pass | None] = lambda: None  # weak: passes have this
        self.trains = False  # whether something has come that is trained

    @classmethod
    def of(cls, traced: Arrays) -> "UnitOrder":
        """Returns the order for a unit called by itself with ``traced``: that of the units before it in the same trace.

        So layers that are units without a model around, as MLX's fully_shard has them, share one order.
        """
        order = cls.latest()
        # MLX takes the mark from arrays when their trace ends.
        if order is None or not bridge.is_traced(order._traced):
            order = cls()
            if traced:
                cls.latest, order._traced = ref(order), traced[0]
        return order


class Unit:
    """Parameters that are sharded as one. ``flats``: by dtype, and apart what is trained and what is frozen.
    ``replicated``: those that every rank holds, whose gradients are averaged all the same. ``path``: of its module in
    the model."""

    def __init__(
        self,
        path: str,
        flats: Sequence[FlatShards],
        replicated: Sequence[Slot],
        channel: UnitChannel,
        replicas: UnitChannel | None,
        dtype: mx.Dtype | None,
        stage: int,
        reshards: bool,
        prefetch: int,
    ) -> None:
        self.path, self.flats, self.replicated = path, flats, replicated
        self.channel, self.replicas = channel, replicas
        self.dtype, self.stage, self.reshards, self.prefetch = dtype, stage, reshards, prefetch
        self.ranks = channel.size * (replicas.size if replicas else 1)
        self._sharded = [slot for flat in flats for slot in flat.slots]
        self._slots = [*replicated, *self._sharded]
        self._runs = False
        self._is_checkpointed = self._has_recomputed = False
        self._constants: tuple[Sequence[Slot], Arrays] = [], []
        self._order: Callable[[], UnitOrder | None] = lambda: None  # of the last call of the model that it is in
        self.leaves = self._leaves()  # by identity, each with its weights
        self.flats_of_leaves = {number for _, weights in self.leaves.values() for number, _, _ in weights}

    def _leaves(self) -> dict[int, tuple[nn.Module, list[Weight]]]:
        """The modules whose parameters the backward pass takes from what it gathers: the forward pass frees them.

        What a module with others inside does with a parameter of its own is not one operation: it stays gathered. So
        do a norm's weights, and all that is so small: to free it would take longer than all else that is done for it.
        """
        sizes, leaves = Counter[int](), dict[int, tuple[nn.Module, list[Weight]]]()
        for number, flat in enumerate(self.flats):
            for place, (slot, shape) in enumerate(zip(flat.slots, flat.shapes)):
                if not slot.module.children():
                    leaves.setdefault(id(slot.module), (slot.module, []))[1].append((number, place, slot))
                    sizes[id(slot.module)] += prod(shape)
        least = sum(sizes.values()) * _SMALL
        return {key: leaf for key, leaf in leaves.items() if sizes[key] >= least}

    def call(self, module: nn.Module, method: Callable[..., Tree], args: tuple, kwargs: dict[str, Any]) -> Tree:
        """``method(module, *args, **kwargs)`` with the full parameters."""
        if self._runs:  # a module of this unit that contains itself, or calls the unit's module
            return method(module, *args, **kwargs)
        slots, arrays = self._constants
        before = _exchange(slots, arrays)
        try:
            return self._call(module, method, args, kwargs)
        finally:
            _exchange(slots, before)

    @contextmanager
    def with_constants(self) -> Iterator[None]:
        """Within, calls take the parameters that are there now, as constants."""
        self._constants = self._slots, [slot.array for slot in self._slots]
        try:
            yield
        finally:
            self._constants = [], []

    def _call(self, module: nn.Module, method: Callable[..., Tree], args: tuple, kwargs: dict[str, Any]) -> Tree:
        order, recomputes = UnitOrder.current.get(), False
        if outermost := order is None:
            # The unit of a model that is called by itself, when the model has been: mx.checkpoint calls it once more.
            order, recomputes = self._order(), self._order() is not None
            order = order or UnitOrder.of(_traced_in(([slot.array for slot in self._slots], args, kwargs))[0])
        else:
            self._order = ref(order)
        self._runs, token = True, UnitOrder.current.set(order)
        try:
            # MLX traces all arguments of the function that is differentiated. Before the first unit that is trained no
            # gradient is wanted, unless what the model itself is called with has one.
            order.trains = (
                order.trains
                or any(slot.is_trained for slot in self._slots)
                or outermost
                and bool(_traced_in((args, kwargs))[0])
            )
            if bridge.traces() and order.trains:
                return self._call_traced(order, recomputes, module, method, args, kwargs)
            before = _arrays_in((args, kwargs)) if outermost else []  # or nothing would order units called one by one
            fulls = [flat.unpack(self.gather(order, flat, flat.shards(), *before)) for flat in self.flats]
            shards = _exchange(self._sharded, [array for arrays in fulls for array in arrays])
            try:
                return method(module, *args, **kwargs)
            finally:
                _exchange(self._sharded, shards)
        finally:
            self._runs = False
            UnitOrder.current.reset(token)

    def _call_traced(
        self,
        order: UnitOrder,
        recomputes: bool,
        module: nn.Module,
        method: Callable[..., Tree],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Tree:
        inputs, put_back = _traced_arguments(args, kwargs)
        # What mx.checkpoint recomputes has no backward pass of its own. That it does shows in the step before.
        if not recomputes:
            self._is_checkpointed = self._has_recomputed
        self._has_recomputed = recomputes
        # Of a layer whose input has no gradient nothing reads the parameters again: it is a product or a lookup.
        reshards = self.reshards and not (recomputes or self._is_checkpointed)
        reshards = reshards and bool(inputs or id(module) not in self.leaves)
        this = _Pass(self, order, reshards)
        inputs, fulls, replicated = this.enter(inputs)
        args, kwargs = put_back(inputs)
        before = _exchange(self._slots, [*replicated, *(array for arrays in fulls for array in arrays)])
        try:
            if not reshards:
                result = method(module, *args, **kwargs)
            else:
                with this.watching(module):
                    leaf = this.call_leaf if id(module) in self.leaves else None
                    result = leaf(module, method, args, kwargs) if leaf else method(module, *args, **kwargs)
        finally:
            _exchange(self._slots, before)
        outputs, put_result = _traced_result(result)
        return put_result(this.leave(outputs)) if outputs else result

    def gather(self, order: UnitOrder, flat: FlatShards, shards: Arrays, *after: mx.array) -> mx.array:
        """Gathers all ranks' shards into the vector of the full parameters."""
        step = gradient_accumulation.current() if self.stage < 3 else None
        if step and id(flat) in step.parameters:
            return step.parameters[id(flat)]
        dtype = self.dtype if self.dtype and mx.issubdtype(flat.dtype, mx.floating) else flat.dtype
        with self._labeled("gather"):
            vector = order.carry_out(self.channel.gather, flat.pack_shards(shards, dtype), *after)
        if step and bridge.traces():
            step.parameters[id(flat)] = vector
        return vector

    def accumulate(self, key: Any, packed: mx.array) -> mx.array | None:
        """The gradients of all micro-batches of a step; ``None`` before the last one, if they wait for it."""
        step = gradient_accumulation.current() if self.stage == 1 else None
        if step is None:
            return packed
        total = packed.astype(mx.float32)
        if key in step.gradients:
            total = total + step.gradients.pop(key)
        if step.is_last:
            return total.astype(packed.dtype)
        step.gradients[key] = total
        return None

    def reduce(self, order: UnitOrder, flat: FlatShards, packed: mx.array) -> mx.array:
        """This rank's shard of the mean over the ranks."""
        with self._labeled("gradients"):
            total = order.carry_out(self.channel.scatter, packed).astype(flat.dtype, stream=UnitChannel.stream)
            return self._mean(order, total)

    def average(self, order: UnitOrder, array: mx.array) -> mx.array:
        """The mean of all ranks' arrays."""
        with self._labeled("replicated gradients"):
            return self._mean(order, order.carry_out(self.channel.add_up, array))

    def _labeled(self, what: str) -> AbstractContextManager[None]:
        return label_scope(self.path and f"{self.path} {what}")

    def _mean(self, order: UnitOrder, total: mx.array) -> mx.array:
        if self.replicas:
            total = order.carry_out(self.replicas.add_up, total)
        return mx.divide(total, self.ranks, stream=UnitChannel.stream)


class _Pass:
    """A call of a unit in a function that is differentiated, from the forward to the backward pass."""

    def __init__(self, unit: Unit, order: UnitOrder, reshards: bool) -> None:
        self.unit, self.order, self.reshards = unit, order, reshards
        self.shards = [_arrays_of(flat.slots) for flat in unit.flats]
        self._fulls: list[Arrays] = []
        self._again: list[Arrays] | None = None  # the full parameters that the backward pass has gathered
        self._behind: Arrays = []  # the gradients of the unit behind this one, on their way
        self._previous = order.last_pass()
        order.last_pass = ref(self)

    def enter(self, inputs: Arrays) -> tuple[Arrays, list[Arrays], Arrays]:
        """The inputs themselves, the full parameters of each of ``flats``, and the replicated parameters."""
        unit = self.unit
        trained = [any(slot.is_trained for slot in flat.slots) for flat in unit.flats]
        replicated = [slot.array for slot in unit.replicated]
        shards = [shard for of, one in zip(self.shards, trained) if one for shard in of]
        before = inputs if unit.prefetch == 0 else []

        passed, flats = len(inputs) + len(replicated), [flat for flat, one in zip(unit.flats, trained) if one]

        def forward(arrays: Arrays) -> Arrays:
            results, begin = arrays[:passed], passed
            for flat in flats:
                end = begin + len(flat.slots)
                results += self._unpack(flat, unit.gather(self.order, flat, arrays[begin:end], *before))
                begin = end
            return results

        def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
            fulls = _parted(cotangents[passed:], flats)
            return self._reduce(cotangents[: len(inputs)], cotangents[len(inputs) : passed], flats, fulls)

        function: Any = mx.custom_function(forward)
        function.vjp(backward)
        results = function([*inputs, *replicated, *shards]) if inputs or replicated or shards else []
        of_trained = iter(_parted(results[passed:], flats))
        self._fulls = [
            next(of_trained) if one else self._unpack(flat, unit.gather(self.order, flat, of, *before))
            for flat, of, one in zip(unit.flats, self.shards, trained)
        ]
        return results[: len(inputs)], self._fulls, results[len(inputs) : passed]

    def leave(self, outputs: Arrays) -> Arrays:
        """Returns the outputs. Their backward pass gathers the parameters of this unit, and of units before it."""
        return list(with_gradients(self._gather_again, outputs)) if self.reshards else outputs

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Within, the leaves of the unit but ``module`` take what :meth:`call_leaf` says."""
        leaves = [leaf for leaf, _ in self.unit.leaves.values() if leaf is not module]
        for leaf in leaves:
            leaf.__dict__["_pass"] = self  # past nn.Module's own way, which is for parameters
        try:
            with with_classes(leaves, _leaf):
                yield
        finally:
            for leaf in leaves:
                del leaf.__dict__["_pass"]

    def call_leaf(self, leaf: nn.Module, method: Callable[..., Tree], args: tuple, kwargs: dict[str, Any]) -> Tree:
        """``method(leaf, *args, **kwargs)``. Backward: with the parameters that the backward pass has gathered.

        So those of the forward pass are free after it. The backward pass runs the method once more, but as MLX is lazy
        that computes only what the gradient needs of it: nothing for products, lookups and norms.
        """
        inputs, put_back = _traced_arguments(args, kwargs)
        weights, computed, count = list[Weight](), list[Weight](), len(inputs)
        for weight in self.unit.leaves[id(leaf)][1]:
            number, place, slot = weight
            # What something else has put there instead, it has computed from what is gathered: an input like others.
            is_gathered = slot.container[slot.key] is self._fulls[number][place]
            (weights if is_gathered else computed).append(weight)
        slots = [slot for _, _, slot in (*computed, *weights)]
        put_result: Callable[[Arrays], Tree] = tuple
        again = repeated(leaf)

        def run(arrays: Arrays) -> Arrays:
            nonlocal put_result
            before = _exchange(slots, arrays[count:])
            try:
                args, kwargs = put_back(arrays[:count])
                results, put_result = _traced_result(method(leaf, *args, **kwargs))
            finally:
                _exchange(slots, before)
            # None where all that the leaf takes is constant, or what it returns has no gradient: MLX 0.32 takes the
            # stream of the first one, unasked.
            return results or [mx.zeros(())]

        def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
            if self._again is None:
                self._gather_again(cotangents)
            assert self._again is not None
            known = count + len(computed)
            arrays, wanted = primals[:known], [True] * known
            for number, place, slot in weights:
                arrays.append(self._again[number][place])
                wanted.append(slot.is_trained)
            with again():
                return _gradients(run, arrays, wanted, cotangents)

        function: Any = mx.custom_function(run)
        function.vjp(backward)
        results = function(inputs + _arrays_of(slots))  # which sets put_result
        return put_result(results)

    def _unpack(self, flat: FlatShards, vector: mx.array) -> Arrays:
        fulls = flat.unpack(vector)
        if not self.reshards:
            return fulls
        # A view that is needed for the backward pass would keep all of the vector.
        leaves = self.unit.leaves
        return [a if id(slot.module) in leaves else mx.contiguous(a) for slot, a in zip(flat.slots, fulls)]

    def _gather_again(self, cotangents: Sequence[mx.array]) -> Sequence[mx.array]:
        this: _Pass | None = self
        for _ in range(self.unit.prefetch + 1):
            if this is None:
                break
            if this.reshards and this._again is None:
                unit, this._again = this.unit, [[] for _ in this.unit.flats]
                for number in unit.flats_of_leaves:
                    flat = unit.flats[number]
                    vector = unit.gather(self.order, flat, this.shards[number], *cotangents)
                    this._again[number] = flat.unpack(vector)
            this = this._previous
        return cotangents

    def _reduce(self, entered: Arrays, adapters: Arrays, flats: Sequence[FlatShards], fulls: list[Arrays]) -> Arrays:
        """Returns the gradients of the arguments of :meth:`enter`, from the gradients of its results.

        They are computed and packed before the backward pass goes on, whichever of them is evaluated first: MLX would
        compute all of them at the end. They leave while the backward pass goes on, which waits until the gradients of
        the unit behind this one have arrived, so that those of no more than two units are on their way.
        """
        unit = self.unit
        # What mx.checkpoint has computed once more, inside the unit, has left full parameters there.
        for flat, shards in zip(unit.flats, self.shards):
            _exchange(flat.slots, shards)
        packed, sums, gradients = [], [], []
        for flat, arrays in zip(flats, fulls):
            vector = unit.accumulate(id(flat), flat.pack(arrays))
            if vector is None:
                gradients += flat.unpack_shards(mx.zeros((flat.length,), flat.dtype))  # mx.checkpoint fills slots
                continue
            packed.append(vector)
            sums.append(unit.reduce(self.order, flat, vector))
            gradients += flat.unpack_shards(sums[-1])
        if adapters:
            vector = unit.accumulate(id(unit), pack([array.astype(mx.float32) for array in adapters]))
            if vector is None:
                adapters = [mx.zeros_like(array) for array in adapters]
            else:
                packed.append(vector)
                sums.append(unit.average(self.order, vector))
                means = unpack(sums[-1], [array.shape for array in adapters])
                adapters = [mean.astype(array.dtype) for mean, array in zip(means, adapters)]
        if entered:
            entered = list(mx.depends(entered, [*packed, *self._behind]))
        if self._previous is not None:
            self._previous._behind = sums
        # What is not evaluated keeps the graph, and the graph this.
        self._previous, self._again, self._behind, self._fulls, self.shards = None, None, [], [], []
        return [*entered, *adapters, *gradients]


def _exchange(slots: Sequence[Slot], arrays: Sequence[mx.array]) -> Arrays:
    """Puts the arrays where the slots are. Returns those that were there, to put them back."""
    before = []
    for slot, array in zip(slots, arrays):
        container, key = slot.container, slot.key
        before.append(container[key])
        container[key] = array
    return before


def _arrays_of(slots: Sequence[Slot]) -> Arrays:
    """The arrays where the slots are, without a call for each."""
    return [slot.container[slot.key] for slot in slots]


def _parted(arrays: Sequence[mx.array], flats: Sequence[FlatShards]) -> list[Arrays]:
    """The arrays of each of ``flats``, from those of all of them one after the other."""
    ends = list(accumulate((len(flat.slots) for flat in flats), initial=0))
    return [list(arrays[begin:end]) for begin, end in pairwise(ends)]


def _gradients(
    function: Callable[[Arrays], Arrays], arrays: Arrays, wanted: Sequence[bool], cotangents: Arrays
) -> Arrays:
    """The gradients of all arguments of ``function``: zeros of those that are not wanted."""
    if all(wanted):
        return mx.vjp(lambda *values: function(list(values)), arrays, cotangents)[1]
    places = [place for place, one in enumerate(wanted) if one]

    def of_wanted(*values: mx.array) -> Arrays:
        given = list(arrays)
        for place, value in zip(places, values):
            given[place] = value
        return function(given)

    gradients = [mx.zeros_like(array) for array in arrays]
    if places:
        _, found = mx.vjp(of_wanted, [arrays[place] for place in places], cotangents)
        for place, gradient in zip(places, found):
            gradients[place] = gradient
    return gradients


def _arrays_in(tree: Tree) -> Arrays:
    flat: Any = tree_flatten(tree, is_leaf=lambda node: isinstance(node, nn.Module))
    return [leaf for _, leaf in flat if isinstance(leaf, mx.array)]


def _is_traced(leaf: Any) -> bool:
    """Whether ``leaf`` is an array that can have a gradient."""
    return isinstance(leaf, mx.array) and bridge.is_traced(leaf) and mx.issubdtype(leaf.dtype, mx.inexact)


def _traced_in(tree: Tree) -> tuple[Arrays, Callable[[Arrays], Tree]]:
    """The arrays in a tree that can have a gradient, and a function that puts others in their place."""
    found: Arrays = []

    def find(leaf: Any) -> Any:
        if _is_traced(leaf):
            found.append(leaf)
            return _Hole
        return leaf

    with_holes = tree_map(find, tree)

    def put_back(arrays: Arrays) -> Tree:
        rest = iter(arrays)
        return tree_map(lambda leaf: next(rest) if leaf is _Hole else leaf, with_holes)

    return found, put_back


def _traced_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Arrays, Callable[[Arrays], Any]]:
    """:func:`_traced_in` of ``(args, kwargs)``, without tree_map where the arguments are no trees: it takes longer than
    all else that is done for a layer."""
    found, places, names = Arrays(), list[int](), list[str]()
    # What put_back keeps must not keep the arrays in memory.
    rest, constants = list(args), dict(kwargs)
    for place, leaf in enumerate(args):
        if isinstance(leaf, _TREES):
            return _traced_in((args, kwargs))
        if _is_traced(leaf):
            found.append(leaf)
            places.append(place)
            rest[place] = None
    for name, leaf in kwargs.items():
        if isinstance(leaf, _TREES):
            return _traced_in((args, kwargs))
        if _is_traced(leaf):
            found.append(leaf)
            names.append(name)
            constants[name] = None

    def put_back(arrays: Arrays) -> Any:
        given = rest.copy()
        for place, array in zip(places, arrays):
            given[place] = array
        return given, {**constants, **dict(zip(names, arrays[len(places) :]))}

    return found, put_back


def _traced_result(result: Tree) -> tuple[Arrays, Callable[[Arrays], Tree]]:
    """:func:`_traced_in` of a result, which is an array almost always."""
    return ([result], itemgetter(0)) if _is_traced(result) else _traced_in(result)


class _Hole:
    """A mark in a tree where an array was."""


@cache
def _leaf(kind: Any) -> type[nn.Module]:
    return type(
        kind.__name__, (kind,), {name: _leaf_method(getattr(kind, name)) for name in METHODS if hasattr(kind, name)}
    )


def _leaf_method(method: Callable[..., Tree]) -> Callable[..., Tree]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Tree:
        return self._pass.call_leaf(self, method, args, kwargs)

    return call
