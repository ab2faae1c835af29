"""What makes a cut model train as the whole one would: the borders of its cut blocks.

Inside of a cut block each rank holds its own activations, and of the gradients only its share. So the input of a block
goes through :func:`mlxdist.nn.copy_to_tensor_parallel_region`, its result is a sum over the ranks whose gradient is the
cotangent itself, and parameters that are whole inside of it (norms of one head, routers, latent projections) have the
sum of all ranks' gradients, as have KV heads that several ranks hold, and of a low-rank adapter on a cut layer the
matrix that is whole. The column-parallel layers inside leave that to the border. The forward pass has no collective
more, and the backward pass one for the input of a block and one for all its whole parameters together (Shoeybi et al.
2019, "Megatron-LM", arXiv:1909.08053).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from threading import Lock, get_ident
from typing import Any
from weakref import ReferenceType, ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxdist.nn.mappings import copy_to_tensor_parallel_region, with_gradients, without_gradient
from mlxdist.nn.partition import copy_to_holders
from mlxdist.nn.tensor_parallel.lora import LoRALinear
from mlxdist.nn.tensor_parallel.parallel_linear import CutLinear
from mlxdist.runtime.group import Group
from mlxdist.runtime.native import bridge
from mlxdist.runtime.ops import all_sum

from .adapters import whole_matrix
from .block_parts import own_arrays, source_of
from .layers import COLUMNS, put_in
from .parameters import Shard, overlap

__all__ = ["Border", "refuse_training", "why_not"]


# Files of mlx-lm whose models, and blocks that add up their results themselves, tests/test_training.py has compared
# with those that are not cut.
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
# What a module has that is cut, or adds up over the ranks.
_MARKS = {"_border", "_group", "group", "sharding_group"}


def why_not(module: nn.Module) -> str | None:
    """Why what mlx-lm itself makes parallel in ``module``, a model or a block, cannot be trained."""
    source = source_of(module)
    if source in _COMPARED:
        return None
    return _REFUSED.get(source, f"how {type(module).__name__} of {source} adds up its results is not known")


@dataclass(frozen=True)
class _Place:
    """One module of a block.

    Attributes:
        names: from the block to it; "" is the block.
        found: what was there when the block was cut. It is not kept alive: there may be an adapter instead, or the
            layer quantized.
        whole: of the parameters in it that all ranks hold, by what a rank multiplies each where it uses it.
        shared: the parameters of which some ranks hold the same pieces.
        cut: the names of the parameters that are cut.
        of_adapters: the matrix of an adapter on it that sees one rank's share, and is held by all; None: there is none.
    """

    names: str
    found: ReferenceType
    whole: dict[str, float]
    shared: dict[str, Shard]
    cut: frozenset[str]
    of_adapters: str | None

    def module(self, block: nn.Module) -> nn.Module | None:
        """What is there now."""
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

    def why_not(self, layers: Sequence[nn.Module]) -> str | None:
        """Why it is not known how these layers train in the place of one that is cut."""
        if not layers or layers[0] is self.found():
            return None
        *adapters, layer = layers
        for adapter in adapters:
            is_lora = {name for name, _ in own_arrays(adapter)} == {"lora_a", "lora_b"} and self.of_adapters is not None
            # mlx-lm's own takes the layer for a whole one: its product would not be summed over the ranks.
            if not is_lora or isinstance(layer, CutLinear) and not isinstance(adapter, LoRALinear):
                return f"how {type(adapter).__name__}, put on the cut {self.names}, trains is not known"
        known = {*self.whole, *self.shared, *self.cut, "bias", "scales", "biases"}
        if layer is not self.found() and {name for name, _ in tree_flatten(layer.parameters())} - known:
            return f"how {type(layer).__name__}, put in the place of the cut {self.names}, trains is not known"
        return None


class Border:
    """Of one block.

    Attributes:
        group: over whose ranks the block is cut.
        rank: this one's number in the plan.
        enters: whether the input is copied here; otherwise the block does it itself.
        places: the modules of the block that have parameters.
        scaled: those with what a rank multiplies by something.
    """

    def __init__(self, group: Group, rank: int, enters: bool) -> None:
        self.group, self.rank, self.enters = group, rank, enters
        self.places: list[_Place] = []
        self.scaled: list[_Place] = []
        self._lock = Lock()
        self._thread: int | None = None

    def put(self, block: nn.Module, path: str, shards: Sequence[Shard]) -> None:
        """Around ``block``, which is cut already.

        Args:
            path: where it is in the model.
            shards: of the parameters in it that see the activations of one rank only.
        """
        modules = dict(block.named_modules())
        parts: dict[str, dict[str, Shard]] = {}
        for shard in shards:
            where, _, name = shard.path.removeprefix(f"{path}." if path else "").rpartition(".")
            parts.setdefault(where, {})[name] = shard
        self.places = [self._place(where, modules[where], held) for where, held in parts.items()]
        self.scaled = [place for place in self.places if any(scale != 1 for scale in place.whole.values())]
        block._border = self
        if not callable(block):  # only its layers are called: each is a block of its own
            for where, held in parts.items():
                if where:
                    layer, enters = modules[where], type(modules[where]) in COLUMNS
                    Border(self.group, self.rank, enters).put(layer, f"{path}.{where}", list(held.values()))
            return
        for where, held in parts.items():
            if "weight" in held:
                put_in(modules[where], held["weight"], self)
        block.__class__ = _bordered(type(block))

    def _place(self, where: str, module: nn.Module, held: dict[str, Shard]) -> _Place:
        trained = {
            name: shard
            for name, shard in held.items()
            if where not in _BEHIND_THE_SUM and mx.issubdtype(module[name].dtype, mx.floating)
        }
        whole = {name: shard.scale for name, shard in trained.items() if not shard.ranges}
        shared = {
            name: shard
            for name, shard in trained.items()
            if shard.ranges and shard.kind != "experts" and overlap(shard, self.group.size())
        }
        cut = frozenset(name for name, shard in held.items() if shard.ranges)
        return _Place(where, ref(module), whole, shared, cut, whole_matrix(held.get("weight")))

    def cut(self, block: nn.Module) -> Iterator[mx.array]:
        """The parameters of ``block`` of which this rank has a part."""
        for place in self.places:
            if not place.cut:
                continue
            *adapters, layer = place.layers(block) or [{}]
            yield from (array for one in adapters for name, array in own_arrays(one) if name != place.of_adapters)
            yield from (array for name, array in own_arrays(layer) if name not in place.whole)

    def call(self, block: nn.Module, forward: Callable[..., Any], arguments: tuple, keywords: dict) -> Any:
        """``forward(block, ...)``, where the parameters are those with the gradients of all ranks."""
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
        reason = self._why_not(block) if traces else None
        return _refusing_gradients(result, f"a gradient of {type(block).__name__}: {reason}") if reason else result

    @property
    def inside(self) -> bool:
        """Whether this thread is in the block's forward pass."""
        return self._thread == get_ident()

    def _why_not(self, block: nn.Module) -> str | None:
        return next(filter(None, (place.why_not(place.layers(block)) for place in self.places if place.cut)), None)

    def _scaled(self, block: nn.Module) -> list[tuple[nn.Module, str, mx.array]]:
        """What is multiplied."""
        return [
            (layer, name, _times(layer[name], scale))
            for place in self.scaled
            for layer in place.layers(block)[-1:]
            for name, scale in place.whole.items()
            if name in layer
        ]

    def _summed(self, block: nn.Module) -> list[tuple[nn.Module, str, mx.array]]:
        """The parameters that have the gradients of several ranks."""
        whole = [(module, name, scale) for module, name, scale in self._held_by_all(block) if name in module]
        put = []
        # The sums of those that are frozen are only carried out where their gradients are asked for.
        for kind, sum_up in ((False, _summed_together), (True, _summed_each)):
            some = [held for held in whole if (held[1] in getattr(held[0], "_no_grad", ())) is kind]
            arrays = [module[name] for module, name, _ in some]
            copies = with_gradients(lambda cotangents, sum_up=sum_up: sum_up(cotangents, self.group), arrays)
            put += [
                (module, name, _times(copy, scale)) for (module, name, scale), copy in zip(some, copies, strict=True)
            ]
        for place in self.places:
            for name, shard in place.shared.items():
                layer = place.layers(block)[-1:]
                # Quantized, it is frozen.
                if layer and name in layer[0] and layer[0][name].size == prod(shard.shape_on(self.rank)):
                    put.append((layer[0], name, self._of_all_holders(layer[0][name], shard)))
        return put

    def _held_by_all(self, block: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
        """What is whole, and by what it is multiplied: also in an adapter on a layer."""
        for place in self.places:
            layers = place.layers(block)
            if place.cut:
                yield from ((adapter, place.of_adapters, 1.0) for adapter in layers[:-1])
            elif layers and layers[0] is not place.found():
                yield from (
                    (module, name, 1.0)
                    for module in layers[0].modules()
                    for name, array in own_arrays(module)
                    if mx.issubdtype(array.dtype, mx.floating)
                )
                continue
            yield from ((layer, name, scale) for layer in layers[-1:] for name, scale in place.whole.items())

    def _of_all_holders(self, array: mx.array, shard: Shard) -> mx.array:
        part = array.reshape(shard.shape_on(self.rank))
        pieces = shard.slices(self.rank)
        return copy_to_holders(part, pieces, shard.shape[shard.axis], shard.axis, self.group).reshape(array.shape)


def refuse_training(model: nn.Module, reason: str) -> None:
    """Makes every gradient that passes what is cut of ``model``, or its result, an InvalidArgument with ``reason``."""
    for module in model.modules():
        if callable(module) and (module is model or vars(module).keys() & _MARKS):
            module._no_training = reason
            module.__class__ = _refusing(type(module))


def _times(array: mx.array, scale: float) -> mx.array:
    return array if scale == 1 else (array * scale).astype(array.dtype)


def _summed_each(arrays: Sequence[mx.array], group: Group) -> tuple[mx.array, ...]:
    return tuple(all_sum(array, group=group) for array in arrays)


def _summed_together(arrays: Sequence[mx.array], group: Group) -> tuple[mx.array, ...]:
    """One collective for all of a dtype."""
    sums: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
        ends = list(accumulate(arrays[place].size for place in places))[:-1]
        total = all_sum(mx.concatenate([arrays[place].reshape(-1) for place in places]), group=group)
        for place, part in zip(places, mx.split(total, ends) if ends else [total], strict=True):
            sums[place] = part.reshape(arrays[place].shape)
    return tuple(sums)


def _refusing_gradients(result: Any, text: str) -> Any:
    """The result of a forward pass, whose gradient is an InvalidArgument."""
    return tree_map(lambda x: without_gradient(x, text) if isinstance(x, mx.array) else x, result)


@cache
def _bordered(kind: type[nn.Module]) -> type[nn.Module]:
    _, first, *_ = inspect.signature(kind.__call__).parameters

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        border = self._border
        if not border.scaled and not bridge.traces():  # decoding: what is done here costs time for each token
            return kind.__call__(self, *arguments, **keywords)
        if border.enters and arguments:
            arguments = (copy_to_tensor_parallel_region(arguments[0], group=border.group), *arguments[1:])
        elif border.enters:
            keywords[first] = copy_to_tensor_parallel_region(keywords[first], group=border.group)
        return border.call(self, kind.__call__, arguments, keywords)

    return type(f"Cut{kind.__name__}", (kind,), {"__call__": __call__, "__module__": __name__})


@cache
def _refusing(kind: type[nn.Module]) -> type[nn.Module]:
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = kind.__call__(self, *arguments, **keywords)
        text = f"a gradient of {kind.__name__}, which is cut: {self._no_training}"
        return _refusing_gradients(result, text) if bridge.traces() else result

    return type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})
