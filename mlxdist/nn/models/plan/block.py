"""A block of a model, and what is found out about how it can be sharded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.nn.layout.cut import Range
from mlxdist.nn.layout.modules import dtype_name, join_path, own_arrays
from mlxdist.nn.tensor_parallel.linear_layers import LINEARS, unpacked
from mlxdist.nn.tensor_parallel.lora import SWITCH_LINEARS

from .parameters import Shard
from .patterns import KEYS, QUERIES, QUERY_NORMS

# For each rank the pieces that it has.
Ranges = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class Units:
    """Equal units of a dimension, such as heads: how many there are, and for each rank the ranges that it has."""

    ranges: Ranges
    count: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many each rank has."""
        return tuple(sum(stop - start for start, stop in pieces) for pieces in self.ranges)


@dataclass(frozen=True)
class Heads:
    query: Units
    kv: Units
    replicated: bool  # whether several ranks hold the same KV head
    copied: bool  # whether each query head has a copy of its KV head


class Unsharded(Exception):
    """The block is not understood; the text says why it stays unsharded."""


@dataclass(eq=False)
class Block:
    """A part of a model that is sharded as one. Its methods collect what is understood of its module.

    ``shards``: what is sharded in it, by path in the model. ``roles``: what the layers in it become, by path: "column",
    "row", "norm" (over all ranks' heads), "sum" (its results are added up over the ranks), "group" (it adds them up
    itself, over its ``sharding_group``), "inside" (it works on this rank's heads, inside of attention), "experts"
    (whole experts). ``attributes``: numbers that a rank has its shard of, by path of the module and name. ``done``: the
    names in the module that are understood.
    """

    path: str
    module: nn.Module
    shards: dict[str, Shard] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def repeat(self, ep: int) -> None:
        """Repeats a plan for one row of the grid for all ``ep`` rows: they are the same, but for whole experts."""
        for path, shard in self.shards.items():
            if shard.kind != "experts":
                self.shards[path] = replace(shard, ranges=shard.ranges * ep)
        self.attributes = {name: values * ep for name, values in self.attributes.items()}

    def one_of(self, names: Sequence[str], what: str) -> str:
        found = [name for name in names if name in self.module]
        if len(found) != 1:
            raise Unsharded(f"{len(found)} candidates for the {what}: {', '.join(found)}")
        return found[0]

    def check_linear(self, name: str) -> nn.Module:
        layer = self.module[name]
        if type(layer) not in LINEARS and type(layer).__name__ not in SWITCH_LINEARS:
            raise Unsharded(f"{name} is {type(layer).__name__}, which cannot be sharded")
        return layer

    def column(self, name: str, units: Units) -> None:
        """Shards a linear layer's outputs."""
        layer = self.check_linear(name)
        ranges = scaled(units, output_dims(layer), f"{name} has {{}} outputs")
        for parameter, array in own_arrays(layer):
            if parameter != "global_scale":
                self.add(name, parameter, array, "column", array.ndim - (1 if parameter == "bias" else 2), ranges)
        self.roles[join_path(self.path, name)] = "column"

    def row(self, name: str, units: Units) -> None:
        """Shards a linear layer's inputs."""
        layer = self.check_linear(name)
        inputs = input_dims_of(layer)
        ranges = scaled(units, inputs, f"{name} has {{}} inputs")
        for parameter, array in own_arrays(layer):
            if parameter == "bias":
                scale = 1.0 if array.ndim == 1 else 1.0 / len(ranges)
                path = join_path(self.path, name, parameter)
                reason = "is added once, after the sum over the ranks" if scale == 1 else "each rank adds its share"
                self.shards[path] = Shard(path, "full", array.shape, dtype_name(array), scale=scale, reason=reason)
            elif parameter != "global_scale":
                # A quantized weight holds 32 / bits inputs in a word, scales and biases one for each group.
                width = array.shape[-1]
                packed = (
                    ((start * width // inputs, stop * width // inputs) for start, stop in held) for held in ranges
                )
                self.add(name, parameter, array, "row", array.ndim - 1, tuple(map(tuple, packed)))
        self.roles[join_path(self.path, name)] = "row"

    def heads_first(self, name: str, heads: Units) -> None:
        """Shards a module whose parameters have one matrix a head."""
        for parameter, array in own_arrays(self.module[name]):
            if array.shape[0] != heads.count:
                raise Unsharded(f"{name}.{parameter} has {array.shape[0]} matrices for {heads.count} heads")
            self.add(name, parameter, array, "column", 0, heads.ranges)

    def norm(self, name: str, heads: Units, split: Heads) -> None:
        """Norms over one head stay unsharded; a norm over all heads needs all ranks' squares, one of each head is
        sharded."""
        layer = self.module[name]
        arrays = dict(own_arrays(layer)) if isinstance(layer, nn.Module) else {}
        self.done.add(name)
        if any(array.size != array.shape[-1] for array in arrays.values()):
            for parameter, array in arrays.items():
                if array.ndim != 2 or array.shape[0] != heads.count:
                    raise Unsharded(f"{name}.{parameter} of shape {array.shape} is not one row a head")
                self.add(name, parameter, array, "column", 0, heads.ranges)
            return
        projection = first(self.module, QUERIES if name in QUERY_NORMS else KEYS)
        # Of one head, of which a rank has copies, the norm over all is what that of the queries is.
        several = heads.count > 1 or split.copied and "norm" in self.roles.values()
        weight = arrays.get("weight")
        if weight is None or not several or not projection or weight.size != output_dims(self.module[projection]):
            return
        if type(layer) is not nn.RMSNorm or split.replicated and name not in QUERY_NORMS:
            raise Unsharded(f"{name} is a {type(layer).__name__} over all heads")
        self.roles[join_path(self.path, name)] = "norm"
        self.add(name, "weight", weight, "column", 0, scaled(heads, weight.size))

    def per_head(self, path: str, axis: int, heads: Units) -> None:
        """Shards an array with one entry a head along ``axis``: of the module, or of a module in it."""
        name, _, parameter = path.partition(".")
        array = self.module.get(name)
        if isinstance(array, nn.Module) and parameter:
            array = array.get(parameter)
        if not isinstance(array, mx.array):
            return
        if array.ndim <= axis or array.shape[axis] != heads.count:
            raise Unsharded(f"{path} of shape {array.shape} does not have one entry a head along axis {axis}")
        self.add(name, parameter, array, "column", axis, heads.ranges)

    def add(self, name: str, parameter: str, array: mx.array, kind: str, axis: int, ranges: Ranges) -> None:
        path = join_path(self.path, name, parameter)
        self.shards[path] = Shard(path, kind, array.shape, dtype_name(array), axis, ranges)
        self.done.add(name)

    def finish(self, input_dims: int | None) -> None:
        """Everything else must be without parameters, or belong to the block's input or to single numbers."""
        rows = [path.rpartition(".")[2] for path, role in self.roles.items() if role == "row"]
        inner = input_dims_of(self.module[rows[0]]) if rows else -1
        for name, value in self.module.items():
            if name in self.done or name.startswith("_"):
                continue
            nested = False
            arrays = [value] if isinstance(value, mx.array) else []
            if isinstance(value, nn.Module):
                arrays = [array for _, array in own_arrays(value)]
                nested = any(isinstance(item, nn.Module) for item in value.values())
            elif not isinstance(value, mx.array):
                nested = _holds_parameters(value)
            fits = all(array.size == 1 or array.size == input_dims != inner for array in arrays)
            if nested or not (fits or name in ("norm", "x_k") and all(array.size == input_dims for array in arrays)):
                raise Unsharded(f"what {name} does in {type(self.module).__name__} is not known")


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return bool(value.parameters())
    if isinstance(value, (list, tuple, dict)):
        return any(map(_holds_parameters, value.values() if isinstance(value, dict) else value))
    return isinstance(value, mx.array)


def first(module: nn.Module, names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(module.get(name), nn.Module)), None)


def attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    return next((vars(module)[name] for name in names if type(vars(module).get(name)) is int), None)


def output_dims(layer: nn.Module) -> int:
    return _weight_of(layer).shape[-2]


def _weight_of(layer: nn.Module) -> mx.array:
    if not isinstance(weight := layer.get("weight"), mx.array) or weight.ndim < 2:
        raise Unsharded(f"a {type(layer).__name__} in it cannot be sharded")
    return weight


def input_dims_of(layer: nn.Module) -> int:
    return unpacked(layer, _weight_of(layer).shape[-1])


def consecutive(sizes: Sequence[int]) -> Units:
    stops = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return Units(tuple(((stop - size, stop),) for size, stop in zip(sizes, stops, strict=True)), sum(sizes))


def copies(sizes: Sequence[int], held: Sequence[range]) -> Ranges:
    """The KV head of each query head, of the ranks' ``sizes`` and of those ``held``; as many pieces on all ranks."""
    heads = [[head for head in here for _ in range(size // len(here))] for size, here in zip(sizes, held, strict=True)]
    return tuple(
        tuple([(head, head + 1) for head in here] + [(here[-1], here[-1])] * (max(sizes) - len(here))) for here in heads
    )


def scaled(units: Units, length: int, what: str = "{}") -> Ranges:
    """The ranges of a dimension of ``length``, which is all the units; ``what`` it is, for the error."""
    if length % units.count:
        raise Unsharded(f"{what.format(length)}, which are not those of {units.count} heads")
    unit = length // units.count
    return tuple(tuple((start * unit, stop * unit) for start, stop in pieces) for pieces in units.ranges)
