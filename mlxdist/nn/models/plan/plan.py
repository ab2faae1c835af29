"""A plan of how a model is sharded: every parameter, what each rank holds of it, and why it stays unsharded where
it does.

:func:`plan_shards` makes one from a model, :func:`mlxdist.nn.shard_model` carries it out and
:func:`mlxdist.nn.load_sharded` reads only what it names. A plan needs no group and can be made on any machine; it is
printed as a table and kept as JSON.

The ranks are a grid: rank = ep_index * tp + tp_index. Attention and MLPs are sharded over the ``tp`` ranks of a row and
are the same in all ``ep`` rows. Experts are sharded over the ``tp`` ranks too while ``ep`` is 1; otherwise each rank of
the whole grid holds whole experts.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import mlx.nn as nn
from rich.table import Table

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.tables import text
from mlxdist.nn.layout.measured_shares import RankShares, resolve
from mlxdist.nn.layout.modules import dtype_name, parameters
from mlxdist.nn.layout.partition import checked_rank_shares

from .adapters import require_no_adapters
from .blocks import find_blocks
from .own_shard import NotUsable, observe
from .parameters import Shard
from .plan_json import read_plan
from .table import table

__all__ = ["OWN_SHARD", "PATTERNS", "UNSHARDED", "Plan", "Shard", "plan_shards"]

OWN_SHARD, PATTERNS, UNSHARDED = "model.shard()", "patterns", "unsharded"

# Why a parameter stays unsharded that belongs to no block, by what is found in its path.
REASONS = (
    (r"norm|\bln(_|\b)", "a norm, small"),
    (r"\b(q_a|kv_a|wkv_a)\w*\.\w+$", "a latent projection, which all heads share"),
    (
        r"\b(\w*embed(_in|_out|_tokens|dings?)?\w*|wte|wpe|lm_head|output)\.\w+$|lm_head\w*$",
        "the vocabulary is not sharded",
    ),
    (r"\b(router|gate|\w*expert_gate)\.(\w+\.)?\w+$|expert\w*_bias$|correction_bias$", "every rank routes all tokens"),
    (r"mamba|mixer|ssm|conv|A_log|linear_attn|lru", "a recurrent layer or a convolution, computed on each rank"),
)


@dataclass(frozen=True)
class Plan:
    """How a model is sharded. ``str(plan)`` is a table.

    Attributes:
        tp, ep: the grid: ``tp * ep`` ranks.
        rank_shares: how the tensor-parallel ranks share the work, one positive number for each; None: equally.
        shards: each parameter of the model by its path, in the model's order.
        model_type: of the model's configuration.
        how: "model.shard()": the model's own method shards it; "patterns": by names and shapes, see
            :mod:`mlxdist.nn.models.plan.patterns`; "unsharded": nothing is sharded.
        notes: what else is to say: why the model's own method is not used.
    """

    tp: int
    ep: int
    rank_shares: tuple[float, ...] | None
    shards: Mapping[str, Shard]
    model_type: str
    how: str
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks the plan is for."""
        return self.tp * self.ep

    @cached_property
    def sharded(self) -> list[Shard]:
        """The parameters that are sharded."""
        return [shard for shard in self.shards.values() if shard.ranges]

    def bytes(self, rank: int) -> int:
        """How many bytes of parameters a rank holds."""
        return sum(shard.bytes(rank) for shard in self.shards.values())

    @cached_property
    def full_bytes(self) -> int:
        """How many bytes of parameters the model has that is not sharded."""
        return sum(shard.full_bytes for shard in self.shards.values())

    def __str__(self) -> str:
        return text(self.__rich__(), self.notes)

    def __rich__(self) -> Table:
        shares = f", rank shares {list(self.rank_shares)}" if self.rank_shares else ""
        title = f"{self.model_type}: tp={self.tp} x ep={self.ep}{shares}, sharded by {self.how}"
        return table(title, self.ranks, list(self.shards.values()))

    def check(self, model: nn.Module) -> None:
        """Raises InvalidArgument if ``model``, which is not sharded yet, is not the model of this plan.

        Nor may a model that will be sharded have adapters."""
        if self.ranks > 1:
            require_no_adapters(model)
        found = parameters(model)
        for path, shard in self.shards.items():
            if path not in found:
                raise InvalidArgument(f"the plan is for another model: this one has no parameter {path}")
            array = found[path]
            if array.shape != shard.shape or dtype_name(array) != shard.dtype:
                raise InvalidArgument(
                    f"the plan is for another model: {path} is {dtype_name(array)} of shape {array.shape}, "
                    f"in the plan {shard.dtype} of shape {shard.shape}"
                )
        if more := [path for path in found if path not in self.shards]:
            raise InvalidArgument(f"the plan is for another model: it does not have {more[0]} ({len(more)} in all)")

    def to_json(self) -> str:
        """The plan as JSON, which :meth:`from_json` reads: all fields, ``shards`` as a list."""
        fields = dataclasses.asdict(self)
        return json.dumps(fields | {"shards": list(fields["shards"].values())})

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads ``text``, which :meth:`to_json` wrote. Raises InvalidArgument where that is no plan."""
        try:
            fields = read_plan(text)
        except ValueError as error:
            raise InvalidArgument(f"Plan.from_json: this is not the JSON of a plan: {error}") from None
        return cls(**fields | {"shards": {shard.path: shard for shard in fields["shards"]}})


def plan_shards(model: nn.Module, tp: int = 1, ep: int = 1, *, rank_shares: RankShares | None = None) -> Plan:
    """Plans how ``model`` is sharded over ``tp * ep`` ranks. Needs no group; nothing is sent, no parameter is
    evaluated.

    Args:
        model: unsharded, of mlx-lm or built likewise; its parameters may be lazy.
        tp: over how many ranks attention and MLPs are sharded.
        ep: with more than 1, each of the ``tp * ep`` ranks holds whole experts; with 1 experts are sharded inside.
        rank_shares: how the ``tp`` ranks share the work, one positive number for each; None: equally. "memory" and
            "compute" are the speeds of this job's ranks, as `mlxdist calibrate` has measured them, for decoding and
            for prompts and training; a plan has the numbers.

    The model's own ``shard()`` decides where there is one that is right for this number of ranks, experts are sharded
    inside and all ranks get the same; otherwise :mod:`mlxdist.nn.models.plan.patterns`.

    Raises InvalidArgument: ``tp``, ``ep`` or ``rank_shares`` are no such numbers; heads, KV heads, quantization groups
    or experts of the model cannot be sharded as asked; there are adapters on the model, which come after sharding.
    """
    for name, number in (("tp", tp), ("ep", ep)):
        if type(number) is not int or number < 1:
            raise InvalidArgument(f"plan_shards: {name} must be a positive integer, not {number!r}")
    rank_shares = resolve("plan_shards", rank_shares, tp, ep)
    if rank_shares is not None:
        checked_rank_shares("plan_shards", rank_shares, tp)
        rank_shares = tuple(float(share) for share in rank_shares)
    model_type = str(getattr(model, "model_type", type(model).__name__))
    if tp * ep > 1:
        require_no_adapters(model)
    how, notes = UNSHARDED, list[str]()
    sharded, reasons = dict[str, Shard](), dict[str, str]()
    if tp > 1 and ep == 1 and rank_shares is None and hasattr(model, "shard"):
        try:
            sharded, how = observe(model, tp), OWN_SHARD
        except NotUsable as why:
            notes.append(str(why))
    if tp * ep > 1 and how != OWN_SHARD:
        blocks, reasons = find_blocks(model, tp, ep, rank_shares)
        sharded = {path: shard for block in blocks for path, shard in block.shards.items()}
        how = PATTERNS if sharded else UNSHARDED
    shards = {}
    for path, array in parameters(model).items():
        shard = sharded.get(path, Shard(path, "full", array.shape, dtype_name(array)))
        if not shard.ranges and not shard.reason:
            shard = dataclasses.replace(shard, reason=_reason(path, how, reasons, tp * ep))
        shards[path] = shard
    return Plan(tp, ep, rank_shares, shards, model_type, how, tuple(notes))


def _reason(path: str, how: str, reasons: Mapping[str, str], ranks: int) -> str:
    """Why a parameter stays unsharded."""
    if ranks == 1:
        return "there is one rank"
    for block, reason in reasons.items():
        if not block or path.startswith(f"{block}."):
            return reason
    unknown = "belongs to no attention, MLP or experts that are known"
    by_name = (reason for pattern, reason in REASONS if re.search(pattern, path))
    return next(by_name, "model.shard() leaves it unsharded" if how == OWN_SHARD else unknown)
