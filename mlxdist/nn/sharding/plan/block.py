"""What is known of one block of a model while it is decided how it is sharded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn

from mlxdist.nn.tensor_parallel.linear_layers import unpacked
from mlxdist.nn.tensor_parallel.lora import SWITCH_LINEARS

from .parameters import Range, Shard, dtype_name
from .patterns import KEYS, LINEARS, QUERIES, QUERY_NORMS

# For each rank the pieces that it has.
Ranges = tuple[tuple[Range, ...], ...]


@dataclass
class Block:
    """A part of a model that is sharded as one.

    Attributes:
        path: of its module.
        shards: what is sharded in it, by path in the model.
        roles: what the layers in it become, by path: "column", "row", "norm" (over all ranks' heads), "sum" (its
            results are added up over the ranks), "group" (it adds them up itself, over its ``sharding_group``),
            "inside" (it works on this rank's heads, inside of attention), "experts" (whole experts).
        attributes: numbers that a rank has its shard of: (path of the module, name) -> value on each rank.
    """

    path: str
    shards: dict[str, Shard] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def repeat(self, ep: int) -> None:
        """From the ranks of a row of the grid to all: each row is the same, but for whole experts."""
        for path, shard in self.shards.items():
            if shard.kind != "experts":
                self.shards[path] = replace(shard, ranges=shard.ranges * ep)
        self.attributes = {name: values * ep for name, values in self.attributes.items()}


class Unsharded(Exception):
    """The block is not understood; the text says why it stays unsharded."""


@dataclass(frozen=True)
class Heads:
    query: Ranges
    kv: Ranges
    replicated: bool  # whether several ranks hold the same KV head
    copied: bool  # whether each query head has a copy of its KV head


class Known:
    """Collects what is understood of a block's module; finish() rejects the block if that is not all of it."""

    def __init__(self, block: Block, module: nn.Module) -> None:
        self.block, self.module = block, module
        self.done: set[str] = set()

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

    def column(self, name: str, ranges: Ranges, count: int) -> None:
        """Shards a linear layer's outputs, which are `count` equal units, of which each rank has `ranges`."""
        layer = self.check_linear(name)
        outputs = output_dims(layer)
        if outputs % count:
            raise Unsharded(f"{name} has {outputs} outputs, which are not those of {count} heads")
        ranges = scaled(ranges, outputs // count)
        for parameter, array in own_arrays(layer):
            if parameter == "global_scale":
                continue
            self.add(name, parameter, array, "column", array.ndim - (1 if parameter == "bias" else 2), ranges)
        self.block.roles[join_path(self.block.path, name)] = "column"
        self.done.add(name)

    def row(self, name: str, ranges: Ranges, count: int) -> None:
        """Shards a linear layer's inputs."""
        layer = self.check_linear(name)
        inputs = input_dims_of(layer)
        if inputs % count:
            raise Unsharded(f"{name} has {inputs} inputs, which are not those of {count} heads")
        ranges = scaled(ranges, inputs // count)
        for parameter, array in own_arrays(layer):
            if parameter == "bias":
                scale = 1.0 if array.ndim == 1 else 1.0 / len(ranges)
                path = join_path(self.block.path, name, parameter)
                reason = "is added once, after the sum over the ranks" if scale == 1 else "each rank adds its share"
                self.block.shards[path] = Shard(
                    path, "full", array.shape, dtype_name(array), scale=scale, reason=reason
                )
            elif parameter != "global_scale":
                # A quantized weight holds 32 / bits inputs in a word, scales and biases one for each group.
                here = tuple(
                    tuple(
                        (start * array.shape[-1] // inputs, stop * array.shape[-1] // inputs) for start, stop in pieces
                    )
                    for pieces in ranges
                )
                self.add(name, parameter, array, "row", array.ndim - 1, here)
        self.block.roles[join_path(self.block.path, name)] = "row"
        self.done.add(name)

    def heads_first(self, name: str, ranges: Ranges, heads: int) -> None:
        """Shards what has one matrix a head."""
        for parameter, array in own_arrays(self.module[name]):
            if array.shape[0] != heads:
                raise Unsharded(f"{name}.{parameter} has {array.shape[0]} matrices for {heads} heads")
            self.add(name, parameter, array, "column", 0, ranges)
        self.done.add(name)

    def norm(self, name: str, ranges: Ranges, count: int, split: Heads) -> None:
        """Norms over one head stay unsharded; a norm over all heads needs all ranks' squares, one of each head is
        sharded."""
        layer = self.module[name]
        arrays = list(own_arrays(layer)) if isinstance(layer, nn.Module) else []
        if all(array.size == array.shape[-1] for _, array in arrays):
            weight = next((array for parameter, array in arrays if parameter == "weight"), None)
            # Of one head, of which a rank has copies, the norm over all is what that of the queries is.
            several = count > 1 or split.copied and "norm" in self.block.roles.values()
            over_all = weight is not None and several and weight.size == self.heads_dim(name)
            if not over_all:
                self.full(name)
                return
            if type(layer) is not nn.RMSNorm or split.replicated and name not in QUERY_NORMS:
                raise Unsharded(f"{name} is a {type(layer).__name__} over all heads")
            self.block.roles[join_path(self.block.path, name)] = "norm"
            ranges = scaled(ranges, weight.size // count)
            self.add(name, "weight", weight, "column", 0, ranges)
        else:
            for parameter, array in arrays:
                if array.ndim != 2 or array.shape[0] != count:
                    raise Unsharded(f"{name}.{parameter} of shape {array.shape} is not one row a head")
                self.add(name, parameter, array, "column", 0, ranges)
        self.done.add(name)

    def heads_dim(self, name: str) -> int:
        """The width of all heads that a norm may be over."""
        names = QUERIES if name in QUERY_NORMS else KEYS
        projection = first(self.module, names)
        return output_dims(self.module[projection]) if projection else -1

    def per_head(self, path: str, axis: int, ranges: Ranges, count: int) -> None:
        name, _, parameter = path.partition(".")
        value = self.module.get(name)
        array = value.get(parameter) if isinstance(value, nn.Module) and parameter else value
        if not isinstance(array, mx.array) or not parameter and isinstance(value, nn.Module):
            return
        if array.ndim <= axis or array.shape[axis] != count:
            raise Unsharded(f"{path} of shape {array.shape} does not have one entry a head along axis {axis}")
        full = join_path(self.block.path, path)
        self.block.shards[full] = Shard(full, "column", array.shape, dtype_name(array), axis, ranges)
        self.done.add(name)

    def full(self, name: str) -> None:
        self.done.add(name)

    def add(self, name: str, parameter: str, array: mx.array, kind: str, axis: int, ranges: Ranges) -> None:
        path = join_path(self.block.path, name, parameter)
        self.block.shards[path] = Shard(path, kind, array.shape, dtype_name(array), axis, ranges)

    def finish(self, input_dims: int | None) -> None:
        """Everything else must be without parameters, or belong to the block's input or to single numbers."""
        for name, value in self.module.items():
            if name in self.done or name.startswith("_"):
                continue
            if isinstance(value, nn.Module):
                arrays = [array for _, array in own_arrays(value)]
                nested = any(isinstance(item, nn.Module) for item in value.values())
            elif isinstance(value, mx.array):
                arrays, nested = [value], False
            else:
                arrays, nested = [], bool(isinstance(value, (list, dict)) and _holds_parameters(value))
            fits = all(array.size == 1 or array.size == input_dims != self.inner() for array in arrays)
            if nested or not (fits or name in ("norm", "x_k") and all(array.size == input_dims for array in arrays)):
                raise Unsharded(f"what {name} does in {type(self.module).__name__} is not known")

    def inner(self) -> int:
        """The width inside of the block."""
        rows = [path for path, role in self.block.roles.items() if role == "row"]
        return input_dims_of(self.module[rows[0].rpartition(".")[2]]) if rows else -1


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module, also in its lists and dicts, by path."""

    def inside(name: str, value) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from inside(f"{name}.{index}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from inside(f"{name}.{key}", item)

    for name, value in module.items():
        yield from inside(name, value)


def _holds_parameters(value: Mapping | Sequence) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(item, mx.array)
        or isinstance(item, nn.Module)
        and bool(item.parameters())
        or isinstance(item, (list, tuple, dict))
        and _holds_parameters(item)
        for item in items
    )


def own_arrays(layer: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """The parameters that a module has itself."""
    return ((name, value) for name, value in layer.items() if isinstance(value, mx.array) and not name.startswith("_"))


def source_of(module: nn.Module) -> str:
    """The name of the file of a module's class."""
    return type(module).__module__.rpartition(".")[2]


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


def consecutive(sizes: Sequence[int]) -> Ranges:
    stops = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return tuple(((stop - size, stop),) for size, stop in zip(sizes, stops, strict=True))


def copies(sizes: Sequence[int], held: Sequence[range]) -> Ranges:
    """For each of a rank's ``sizes`` query heads its KV head, of those ``held``; as many pieces on all ranks."""
    heads = [[head for head in here for _ in range(size // len(here))] for size, here in zip(sizes, held, strict=True)]
    return tuple(
        tuple([(head, head + 1) for head in here] + [(here[-1], here[-1])] * (max(sizes) - len(here))) for here in heads
    )


def scaled(ranges: Ranges, unit: int) -> Ranges:
    return tuple(tuple((start * unit, stop * unit) for start, stop in pieces) for pieces in ranges)


def lengths(ranges: Ranges) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in pieces) for pieces in ranges)


def join_path(*parts: str) -> str:
    return ".".join(part for part in parts if part)
