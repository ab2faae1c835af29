"""Makes a sharded model train as the full one would, at the boundaries of its sharded blocks.

Inside of a sharded block each rank holds its own activations, and only its share of the gradients. So the input of a
block goes through :func:`mlxdist.nn.copy_to_tensor_parallel_region`, its result is a sum over the ranks whose gradient
is the cotangent itself, and parameters that are full inside of it (norms of one head, routers, latent projections) have
the sum of all ranks' gradients, as have KV heads that several ranks hold, and the full matrix of a low-rank adapter on
a sharded layer. The column-parallel layers inside leave that to the parallel region. The forward pass has no
collective more, and the backward pass one for the input of a block and one for all its full parameters together
(Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from threading import Lock, get_ident
from typing import Any
from weakref import ReferenceType, ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxdist.nn.interception import become, derived
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.layout.modules import join_path, own_arrays, parameters, source_of
from mlxdist.nn.layout.partition import copy_to_holders
from mlxdist.nn.mappings import copy_to_tensor_parallel_region, with_gradients, without_gradient
from mlxdist.nn.tensor_parallel.lora import LoRALinear, ShardedLinear
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.label import label_scope
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.collectives import all_sum
from mlxdist.runtime.operations.packing import pack, unpack

from .adapters import adapter_axis, full_matrix
from .layers import COLUMNS, put_in
from .parameters import Shard, overlap

__all__ = ["ParallelRegion", "refuse_training", "repeated", "why_not"]


# Files of mlx-lm whose models, and blocks that add up their results themselves, tests/nn/test_training.py has compared
# with those that are not sharded.
_COMPARED = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss",
    "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "minimax", "minimax_m3_vl", "ministral3", "mistral4", "qwen2",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "step3p5",
)  # fmt: skip
_ZERO_EXPERTS = "its zero experts are added behind the sum over the ranks, from what is before it"
_REFUSED = {
    "deepseek_v41": "mlx-lm's model has no gradient: it gathers by indices that it does not stop",
    "longcat_flash": _ZERO_EXPERTS,
    "longcat_flash_ngram": _ZERO_EXPERTS,
}
# Parts of blocks that add up their results themselves, which work with the sum.
_BEHIND_THE_SUM = ("routed_expert_norm", "routed_expert_up_proj")
# What a module has that is sharded, or adds up over the ranks.
_MARKS = {"_region", "_group", "group", "sharding_group"}


def why_not(module: nn.Module) -> str | None:
    """Why ``module``, a model or a block that mlx-lm itself makes parallel, cannot be trained; None: it can."""
    source = source_of(module)
    if source in _COMPARED:
        return None
    return _REFUSED.get(source, f"how {type(module).__name__} of {source} adds up its results is not known")


@dataclass(frozen=True)
class _Member:
    """A module of a sharded block, and how the ranks hold its parameters."""

    names: str  # from the block to it; "" is the block
    found: ReferenceType  # what was there when the block was sharded; it may have an adapter or be quantized now
    full: dict[str, float]  # the parameters that all ranks hold, and by what a rank multiplies each where it uses it
    shared: dict[str, Shard]  # the parameters of which some ranks hold the same pieces
    sharded: frozenset[str]
    shards: dict[str, Shard]  # of all its parameters in the plan
    of_adapters: str | None  # the matrix of an adapter on it that sees one rank's share, and is held by all

    def module(self, block: nn.Module) -> nn.Module | None:
        """The module that is in this place of ``block`` now, or None."""
        here: Any = block
        for name in self.names.split(".") if self.names else ():
            here = here[int(name)] if isinstance(here, list) else here.get(name) if isinstance(here, dict) else None
        return here

    def layers(self, block: nn.Module) -> list[nn.Module]:
        """The adapters there, the outermost first, and the layer itself at the end."""
        layers = [module] if (module := self.module(block)) is not None else []
        while layers and isinstance(inner := layers[-1].get("linear"), nn.Module) and layers[-1] is not self.found():
            layers.append(inner)
        return layers

    def sharding(self, name: str, of_adapter: bool) -> tuple[Shard | None, int | None]:
        """The shard that describes a parameter, and its axis; None: it is full. The layer may be quantized now."""
        weight = self.shards.get("weight")
        if of_adapter:
            return weight, None if weight is None else adapter_axis(weight, name)
        shard = self.shards.get(name) or (weight if name in ("scales", "biases") else None)
        return shard, shard.axis if shard and shard.ranges and shard.kind != "experts" else None

    def why_not(self, layers: Sequence[nn.Module]) -> str | None:
        """Why it is not known how these layers train in the place of one that is sharded."""
        if not layers or layers[0] is self.found():
            return None
        *adapters, layer = layers
        for adapter in adapters:
            is_lora = {name for name, _ in own_arrays(adapter)} == {"lora_a", "lora_b"} and self.of_adapters is not None
            # mlx-lm's own takes the layer for a full one: its product would not be summed over the ranks.
            if not is_lora or isinstance(layer, ShardedLinear) and not isinstance(adapter, LoRALinear):
                return f"how {type(adapter).__name__}, put on the sharded {self.names}, trains is not known"
        known = {*self.full, *self.shared, *self.sharded, "bias", "scales", "biases"}
        if layer is not self.found() and parameters(layer).keys() - known:
            return f"how {type(layer).__name__}, put in the place of the sharded {self.names}, trains is not known"
        return None


def repeated(layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """The context in which a backward pass has to repeat a call of ``layer`` that is made now."""
    region = vars(layer).get("_inside")
    return region.repeated if isinstance(region, ParallelRegion) and region.inside else nullcontext


class ParallelRegion:
    """The region of one block, sharded over ``group``; ``rank`` is this rank's number in the plan. ``enters``: whether
    the input is copied here; otherwise the block copies it itself."""

    def __init__(self, group: Group, rank: int, enters: bool) -> None:
        self.group, self.rank, self.enters = group, rank, enters
        self.path = "the model"
        self.members: list[_Member] = []  # the modules that have parameters
        self.scaled: list[_Member] = []  # those with what a rank multiplies by something
        self._lock = Lock()
        self._thread: int | None = None

    def put(self, block: nn.Module, path: str, shards: Sequence[Shard]) -> None:
        """Puts the region around the sharded ``block`` at ``path``; ``shards`` see one rank's activations only."""
        self.path = path or self.path
        modules = dict(block.named_modules())
        parts: dict[str, dict[str, Shard]] = {}
        for shard in shards:
            where, _, name = shard.path.removeprefix(f"{path}." if path else "").rpartition(".")
            parts.setdefault(where, {})[name] = shard
        self.members = [self._member(where, modules[where], held) for where, held in parts.items()]
        self.scaled = [member for member in self.members if any(scale != 1 for scale in member.full.values())]
        block._region = self
        is_called = callable(block)
        if not is_called:  # only its layers are called: each is a block of its own
            for where, held in parts.items():
                if where:
                    layer, enters = modules[where], type(modules[where]) in COLUMNS
                    ParallelRegion(self.group, self.rank, enters).put(layer, f"{path}.{where}", list(held.values()))
            return
        for where, held in parts.items():
            if "weight" in held:
                put_in(modules[where], held["weight"], self)
        kind: Any = type(block)
        become(block, _in_region(kind))

    def _member(self, where: str, module: nn.Module, held: dict[str, Shard]) -> _Member:
        trained = {
            name: shard
            for name, shard in held.items()
            if where not in _BEHIND_THE_SUM and mx.issubdtype(module[name].dtype, mx.floating)
        }
        full = {name: shard.scale for name, shard in trained.items() if not shard.ranges}
        shared = {
            name: shard
            for name, shard in trained.items()
            if shard.ranges and shard.kind != "experts" and overlap(shard, self.group.size())
        }
        sharded = frozenset(name for name, shard in held.items() if shard.ranges)
        return _Member(where, ref(module), full, shared, sharded, held, full_matrix(held.get("weight")))

    def cuts(self, block: nn.Module) -> Iterator[tuple[str, Callable[[], Cut]]]:
        """The cuts of the sharded parameters of ``block``, by their paths in it."""
        for member in self.members:
            layers = member.layers(block) if member.sharded else []
            for depth, layer in enumerate(layers):
                where = join_path(member.names, *["linear"] * depth)
                is_adapter = depth + 1 < len(layers)
                for name, array in own_arrays(layer):
                    shard, axis = member.sharding(name, is_adapter)
                    if shard is not None and axis is not None:
                        yield join_path(where, name), partial(shard.cut, array.shape, axis, group=self.group)

    def sharded_arrays(self, block: nn.Module) -> Iterator[mx.array]:
        """The parameters of ``block`` that are sharded."""
        for member in self.members:
            if not member.sharded:
                continue
            *adapters, layer = member.layers(block) or [nn.Module()]
            yield from (array for one in adapters for name, array in own_arrays(one) if name != member.of_adapters)
            yield from (array for name, array in own_arrays(layer) if name not in member.full)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A context in which a backward pass repeats the call of a layer that was in the region."""
        if self.inside:
            yield
            return
        with self._lock:
            self._thread = get_ident()
            try:
                yield
            finally:
                self._thread = None

    def call(self, block: nn.Module, forward: Callable[..., Any], arguments: tuple, keywords: dict) -> Any:
        """Calls ``forward(block, ...)`` with parameters that have the gradients of all ranks."""
        if self._thread == get_ident():
            return forward(block, *arguments, **keywords)
        traces = bridge.traces()
        with self._lock:  # another thread must not take what is put for this one for the block's own
            put = self._summed(block) if traces else self._scaled(block)
            held = [module[name] for module, name, _ in put]
            self._thread = get_ident()
            try:
                for module, name, array in put:
                    module[name] = array
                result = forward(block, *arguments, **keywords)
            finally:
                self._thread = None
                for (module, name, _), array in zip(put, held, strict=True):
                    module[name] = array
        reasons = (member.why_not(member.layers(block)) for member in self.members if traces and member.sharded)
        reason = next(filter(None, reasons), None)
        return _refusing_gradients(result, f"a gradient of {type(block).__name__}: {reason}") if reason else result

    @property
    def inside(self) -> bool:
        """Whether this thread is in the block's forward pass."""
        return self._thread == get_ident()

    def _scaled(self, block: nn.Module) -> list[tuple[nn.Module, str, mx.array]]:
        """The parameters that this rank scales: (layer, name, the scaled array)."""
        return [
            (layer, name, _times(layer[name], scale))
            for member in self.scaled
            for layer in member.layers(block)[-1:]
            for name, scale in member.full.items()
            if name in layer
        ]

    def _summed(self, block: nn.Module) -> list[tuple[nn.Module, str, mx.array]]:
        """The parameters that have the gradients of several ranks."""
        full = [(module, name, scale) for module, name, scale in self._held_by_all(block) if name in module]
        put = []
        # The sums of those that are frozen are only carried out where their gradients are asked for.
        for kind, sum_up in ((False, _summed_together), (True, _summed_each)):
            some = [held for held in full if (held[1] in getattr(held[0], "_no_grad", ())) is kind]
            arrays = [module[name] for module, name, _ in some]
            copies = with_gradients(partial(sum_up, group=self.group), arrays)
            put += [
                (module, name, _times(copy, scale)) for (module, name, scale), copy in zip(some, copies, strict=True)
            ]
        for member in self.members:
            for name, shard in member.shared.items():
                layer = member.layers(block)[-1:]
                # Quantized, it is frozen.
                if layer and name in layer[0] and layer[0][name].size == prod(shard.shape_on(self.rank)):
                    put.append((layer[0], name, self._of_all_holders(layer[0][name], shard)))
        return put

    def _held_by_all(self, block: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
        """The full parameters, also those of adapters on layers, each with the number that it is multiplied by."""
        for member in self.members:
            layers = member.layers(block)
            if member.sharded:
                yield from ((adapter, member.of_adapters or "", 1.0) for adapter in layers[:-1])
            elif layers and layers[0] is not member.found():
                yield from (
                    (module, name, 1.0)
                    for module in layers[0].modules()
                    for name, array in own_arrays(module)
                    if mx.issubdtype(array.dtype, mx.floating)
                )
                continue
            yield from ((layer, name, scale) for layer in layers[-1:] for name, scale in member.full.items())

    def _of_all_holders(self, array: mx.array, shard: Shard) -> mx.array:
        part = array.reshape(shard.shape_on(self.rank))
        pieces = shard.slices(self.rank)
        return copy_to_holders(part, pieces, shard.shape[shard.axis], shard.axis, self.group).reshape(array.shape)


def refuse_training(model: nn.Module, reason: str) -> None:
    """Makes every gradient that passes what is sharded of ``model``, or its result, an InvalidArgument with
    ``reason``."""
    for module in model.modules():
        if callable(module) and (module is model or vars(module).keys() & _MARKS):
            module._no_training = reason
            kind: Any = type(module)
            become(module, _refusing(kind))


def _times(array: mx.array, scale: float) -> mx.array:
    return array if scale == 1 else (array * scale).astype(array.dtype)


def _summed_each(arrays: Sequence[mx.array], group: Group) -> Sequence[mx.array]:
    return [all_sum(array, group=group) for array in arrays]


def _summed_together(arrays: Sequence[mx.array], group: Group) -> Sequence[mx.array]:
    """The sums over the ranks, by one collective for all arrays of a dtype."""
    sums: dict[int, mx.array] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        some = [number for number, array in enumerate(arrays) if array.dtype == dtype]
        packed = all_sum(pack([arrays[number] for number in some]), group=group)
        sums |= zip(some, unpack(packed, [arrays[number].shape for number in some]), strict=True)
    return [sums[number] for number in range(len(arrays))]


def _refusing_gradients(result: Any, text: str) -> Any:
    """The result of a forward pass, whose gradient is an InvalidArgument."""
    return tree_map(lambda x: without_gradient(x, text) if isinstance(x, mx.array) else x, result)


@cache
def _in_region(kind: Any) -> type[nn.Module]:
    _, first, *_ = inspect.signature(kind.__call__).parameters

    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        region = self._region
        if not region.scaled and not bridge.traces():  # decoding: what is done here costs time for each token
            return kind.__call__(self, *arguments, **keywords)
        with label_scope(region.path):
            if region.enters and arguments:
                arguments = (copy_to_tensor_parallel_region(arguments[0], group=region.group), *arguments[1:])
            elif region.enters:
                keywords[first] = copy_to_tensor_parallel_region(keywords[first], group=region.group)
            return region.call(self, kind.__call__, arguments, keywords)

    return derived(kind, {"__call__": __call__}, f"Sharded{kind.__name__}")


@cache
def _refusing(kind: Any) -> type[nn.Module]:
    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = kind.__call__(self, *arguments, **keywords)
        text = f"a gradient of {kind.__name__}, which is sharded: {self._no_training}"
        return _refusing_gradients(result, text) if bridge.traces() else result

    return derived(kind, {"__call__": __call__})
