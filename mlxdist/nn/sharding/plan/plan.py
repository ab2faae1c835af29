"""A plan of how a model is cut: every parameter, what each rank holds of it, and why it stays whole where it does.

:func:`plan_shards` makes one from a model, :func:`mlxdist.nn.shard_model` carries it out and
:func:`mlxdist.nn.load_sharded` reads only what it names. A plan needs no group and can be made on any machine; it is
printed as a table and kept as JSON.

The ranks are a grid: rank = ep_index * tp + tp_index. Attention and MLPs are cut over the ``tp`` ranks of a row and
are the same in all ``ep`` rows. Experts are cut over the ``tp`` ranks too while ``ep`` is 1; otherwise each rank of the
whole grid holds whole experts.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn
from rich.table import Table

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.partition import split_sizes

from ..measured_shares import Weights, resolve
from .adapters import require_no_adapters
from .as_json import fields_of, to_json
from .blocks import find_blocks
from .own_shard import NotUsable, observe
from .parameters import Shard, dtype_name, parameters
from .table import table, text

__all__ = ["OWN_SHARD", "PATTERNS", "WHOLE", "Plan", "Shard", "plan_shards"]

OWN_SHARD, PATTERNS, WHOLE = "model.shard()", "patterns", "whole"

# Why a parameter stays whole that belongs to no block, by what is found in its path.
REASONS = (
    (r"norm|\bln(_|\b)", "a norm, small"),
    (r"\b(q_a|kv_a|wkv_a)\w*\.\w+$", "a latent projection, which all heads share"),
    (
        r"\b(\w*embed(_in|_out|_tokens|dings?)?\w*|wte|wpe|lm_head|output)\.\w+$|lm_head\w*$",
        "the vocabulary is not cut",
    ),
    (r"\b(router|gate|\w*expert_gate)\.(\w+\.)?\w+$|expert\w*_bias$|correction_bias$", "every rank routes all tokens"),
    (r"mamba|mixer|ssm|conv|A_log|linear_attn|lru", "a recurrent layer or a convolution, computed on each rank"),
)


@dataclass(frozen=True)
class Plan:
    """How a model is cut. ``str(plan)`` is a table.

    Attributes:
        tp, ep: the grid: ``tp * ep`` ranks.
        weights: how the tensor-parallel ranks share the work, one positive number for each; None: equally.
        shards: each parameter of the model by its path, in the model's order.
        model_type: of the model's configuration.
        how: "model.shard()": the model's own method cuts it; "patterns": by names and shapes, see
            :mod:`mlxdist.nn.sharding.plan.patterns`; "whole": nothing is cut.
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

    @cached_property
    def whole_bytes(self) -> int:
        """How many bytes of parameters the model has that is not cut."""
        return sum(prod(shard.shape) * getattr(mx, shard.dtype).size for shard in self.shards.values())

    def __str__(self) -> str:
        return text(self)

    def __rich__(self) -> Table:
        return table(self)

    def check(self, model: nn.Module) -> None:
        """Raises InvalidArgument if ``model``, which is not cut yet, is not the model of this plan.

        Nor may a model that will be cut have adapters."""
        if self.ranks > 1:
            require_no_adapters(model)
        check_parameters({path: (shard.shape, shard.dtype) for path, shard in self.shards.items()}, model)

    def to_json(self) -> str:
        """The plan as JSON, which :meth:`from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads ``text``, which :meth:`to_json` wrote. Raises InvalidArgument where that is no plan."""
        try:
            return cls(**fields_of(text, {field.name for field in dataclasses.fields(cls)}))
        except ValueError as error:
            raise InvalidArgument(f"Plan.from_json: this is not the JSON of a plan: {error}") from None


def plan_shards(model: nn.Module, tp: int = 1, ep: int = 1, *, weights: Weights | None = None) -> Plan:
    """Plans how ``model`` is cut over ``tp * ep`` ranks. Needs no group; nothing is sent, no parameter is evaluated.

    Args:
        model: whole, of mlx-lm or built likewise; its parameters may be lazy.
        tp: over how many ranks attention and MLPs are cut.
        ep: with more than 1, each of the ``tp * ep`` ranks holds whole experts; with 1 experts are cut inside.
        weights: how the ``tp`` ranks share the work, one positive number for each; None: equally. "memory" and
            "compute" are the speeds of this job's ranks, as `mlxdist calibrate` has measured them, for decoding and
            for prompts and training; a plan has the numbers.

    The model's own ``shard()`` decides where there is one that is right for this number of ranks, experts are cut
    inside and all ranks get the same; otherwise :mod:`mlxdist.nn.sharding.plan.patterns`.

    Raises InvalidArgument: ``tp``, ``ep`` or ``weights`` are no such numbers; heads, KV heads, quantization groups or
    experts of the model cannot be cut as asked; there are adapters on the model, which come after the cut.
    """
    for name, number in (("tp", tp), ("ep", ep)):
        if type(number) is not int or number < 1:
            raise InvalidArgument(f"plan_shards: {name} must be a positive integer, not {number!r}")
    weights = resolve("plan_shards", weights, tp, ep)
    if weights is not None:
        split_sizes("plan_shards: weights", tp, tp, weights)
        weights = tuple(float(weight) for weight in weights)
    model_type = str(getattr(model, "model_type", type(model).__name__))
    if tp * ep > 1:
        require_no_adapters(model)
    notes: tuple[str, ...] = ()
    if tp > 1 and ep == 1 and weights is None and hasattr(model, "shard"):
        try:
            shards = observe(model, tp)
            return Plan(
                tp, ep, None, {path: _explained(shard) for path, shard in shards.items()}, model_type, OWN_SHARD
            )
        except NotUsable as why:
            notes = (str(why),)
    blocks, reasons = find_blocks(model, tp, ep, weights) if tp * ep > 1 else ([], {})
    cut = {path: shard for block in blocks for path, shard in block.shards.items()}
    shards = {
        path: cut.get(path)
        or Shard(path, "whole", array.shape, dtype_name(array), reason=_reason(path, reasons, tp * ep))
        for path, array in parameters(model).items()
    }
    return Plan(tp, ep, weights, shards, model_type, PATTERNS if cut else WHOLE, notes)


def _explained(shard: Shard) -> Shard:
    """With what can be said of a parameter that the model's own shard() leaves whole."""
    if shard.ranges:
        return shard
    return dataclasses.replace(shard, reason=_by_name(shard.path) or "model.shard() leaves it whole")


def _reason(path: str, reasons: Mapping[str, str], ranks: int) -> str:
    """Why a parameter stays whole that no block has."""
    if ranks == 1:
        return "there is one rank"
    for block, reason in reasons.items():
        if not block or path.startswith(f"{block}."):
            return reason
    return _by_name(path) or "belongs to no attention, MLP or experts that are known"


def _by_name(path: str) -> str | None:
    return next((reason for pattern, reason in REASONS if re.search(pattern, path)), None)


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
