"""A plan of how a model is cut: every parameter, what each rank holds of it, and why it stays whole where it does.

:func:`plan_shards` makes one from a model, :func:`mlxdist.nn.shard_model` carries it out and
:func:`mlxdist.nn.load_sharded` reads only what it names. A plan needs no group and can be made on any machine; it is
printed as a table and kept as JSON.

The ranks are a grid: rank = ep_index * tp + tp_index. Attention and MLPs are cut over the ``tp`` ranks of a row and
are the same in all ``ep`` rows. Experts are cut over the ``tp`` ranks too while ``ep`` is 1; otherwise each rank of the
whole grid holds whole experts.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import InvalidArgument

__all__ = ["KINDS", "Plan", "Shard"]

KINDS = ("column", "row", "vocab", "experts", "whole")

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """What the ranks hold of one parameter.

    Attributes:
        path: where it is in the model: "model.layers.0.self_attn.q_proj.weight".
        kind: "column": a rank has some outputs of a layer (also: some heads); "row": some of its inputs; "vocab": some
            words; "experts": some experts; "whole": every rank has all of it.
        shape: of the parameter that is not cut.
        dtype: its name: "float32".
        axis: along which it is cut; 0 if it is not.
        ranges: for each rank, which pieces along the axis it has, in this order: ``((start, stop), ...)``. Fused layers
            have several pieces; a piece may be on more than one rank (KV heads where there are fewer than ranks).
        scale: what every rank multiplies it by, for what is added up over the ranks and must count once (a bias of
            experts that are cut inside): 1 / ranks. Otherwise 1.
        reason: why it stays whole; "" where it is cut.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = 0
    ranges: tuple[tuple[Range, ...], ...] = ()
    scale: float = 1.0
    reason: str = ""

    @property
    def sizes(self) -> list[int]:
        """How much of the axis each rank holds; [] if the parameter is whole."""
        return [sum(stop - start for start, stop in pieces) for pieces in self.ranges]

    @property
    def segments(self) -> tuple[int, ...]:
        """The lengths of the pieces along the axis that are cut each by itself: one, if it is not a fused layer."""
        if not self.ranges:
            return (self.shape[self.axis],) if self.shape else ()
        pieces = zip(*self.ranges, strict=True)
        return tuple(sum(stop - start for start, stop in set(ranges)) for ranges in pieces)

    def slices(self, rank: int) -> list[slice]:
        """What a rank has along the axis: these slices, joined in this order."""
        if not self.ranges:
            return [slice(0, self.shape[self.axis])] if self.shape else []
        return [slice(start, stop) for start, stop in self.ranges[rank]]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        if not self.ranges:
            return self.shape
        return (*self.shape[: self.axis], self.sizes[rank], *self.shape[self.axis + 1 :])

    def bytes(self, rank: int) -> int:
        """How many bytes a rank holds."""
        return prod(self.shape_on(rank)) * getattr(mx, self.dtype).size

    def take(self, x: mx.array, rank: int) -> mx.array:
        """A rank's part of the whole parameter; lazy."""
        if self.ranges:
            before = (slice(None),) * self.axis
            parts = [x[(*before, part)] for part in self.slices(rank)]
            x = mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=self.axis))
        return x if self.scale == 1 else (x * self.scale).astype(x.dtype)


@dataclass(frozen=True)
class Plan:
    """How a model is cut. ``str(plan)`` is a table.

    Attributes:
        tp, ep: the grid: ``tp * ep`` ranks.
        weights: how the tensor-parallel ranks share the work, one positive number for each; None: equally.
        shards: each parameter of the model by its path, in the model's order.
        model_type: of the model's configuration.
        how: "model.shard()": the model's own method cuts it; "patterns": by names and shapes, see
            :mod:`mlxdist.nn.patterns`; "whole": nothing is cut.
        notes: what else is to say: why the model's own method is not used.
    """

    tp: int
    ep: int
    weights: tuple[float, ...] | None
    shards: Mapping[str, Shard]
    model_type: str
    how: str
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks the plan is for."""
        return self.tp * self.ep

    @cached_property
    def cut(self) -> list[Shard]:
        """What is cut."""
        return [shard for shard in self.shards.values() if shard.ranges]

    def bytes(self, rank: int) -> int:
        """How many bytes of parameters a rank holds."""
        return sum(shard.bytes(rank) for shard in self.shards.values())

    def check(self, model: nn.Module) -> None:
        """Raises InvalidArgument if ``model``, which is not cut yet, is not the model of this plan."""
        check_parameters({path: (shard.shape, shard.dtype) for path, shard in self.shards.items()}, model)

    def to_json(self) -> str:
        """The plan as JSON, which :meth:`from_json` reads."""
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        document["shards"] = [dataclasses.asdict(shard) for shard in self.shards.values()]
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what :meth:`to_json` wrote. Raises InvalidArgument where that is no plan."""
        try:
            document = json.loads(text)
            shards = [Shard(**_tuples(shard)) for shard in document.pop("shards")]
            plan = cls(shards={shard.path: shard for shard in shards}, **_tuples(document))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"Plan.from_json: this is not the JSON of a plan: {error}") from error
        return plan


def check_parameters(expected: Mapping[str, tuple[Sequence[int], str]], model: nn.Module) -> None:
    """Raises InvalidArgument, naming some, where the model's parameters are not the expected ones."""
    found = parameters(model)
    for path, (shape, dtype) in expected.items():
        if path not in found:
            raise InvalidArgument(f"the plan is for another model: this one has no parameter {path}")
        array = found[path]
        if array.shape != tuple(shape) or dtype_name(array) != dtype:
            raise InvalidArgument(
                f"the plan is for another model: {path} is {dtype_name(array)} of shape {array.shape}, "
                f"in the plan {dtype} of shape {tuple(shape)}"
            )
    if more := [path for path in found if path not in expected]:
        raise InvalidArgument(f"the plan is for another model: it does not have {more[0]} ({len(more)} in all)")


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """All parameters by path; nothing is evaluated."""
    return dict(tree_flatten(model.parameters()))


def dtype_name(array: mx.array) -> str:
    """The name of an array's dtype: "float32"."""
    return str(array.dtype).removeprefix("mlx.core.")


def _tuples(fields: dict) -> dict:
    """JSON has lists where the dataclasses have tuples."""
    freeze = lambda value: tuple(map(freeze, value)) if isinstance(value, list) else value  # noqa: E731
    return {name: freeze(value) for name, value in fields.items()}
