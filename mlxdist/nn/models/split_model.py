"""A full model of mlx-lm whose layers are `SplitBlock`s, or its own layers sharded, for mlx-lm's own generate."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.opaque import Opaque, create
from mlxdist.nn.models.plan import shard_model
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..equal_inputs import compare_inputs
from ..rank_checks import agree, agreed, described
from ..split_block.head import InPlaceOf, shard_head
from ..split_block.probes import boundaries, logits_at
from ..split_block.shard_layer import require_shardable
from ..split_block.split_block import SplitBlock, relative_error, settings, table_of
from ..split_block.submissions import submit_sums
from .plan import plan_shards

__all__ = ["SplitModel"]

NAME = "SplitModel.from_model"
TOLERANCE = {mx.float32: 1e-3, mx.float16: 5e-2, mx.bfloat16: 1e-1}  # relative difference of logits


class SplitModel(InPlaceOf, metaclass=Opaque):
    """A model made by :meth:`from_model`. ``mlx_lm.generate(model, tokenizer, ...)`` takes it like mlx-lm's own model.

    Every rank must generate the same tokens: from the same seed, or greedily. Logits are equal on all of them. Ranks
    that call it with different arrays raise a Mismatch.

    Attributes:
        model: mlx-lm's own, with other layers. Attributes that this class does not have are looked up there.
        why_not_blocks: why the layers are mlx-lm's own and sharded by `shard_model`; ``None`` where they are
            `SplitBlock`s.
    """

    original = "model"
    _made_by = NAME

    def __init__(self, model: nn.Module, why_not_blocks: str | None) -> None:
        super().__init__()
        self.model = model
        self.why_not_blocks = why_not_blocks

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        group: GroupLike | None = None,
        rank_shares: Sequence[float] | None = None,
        transposed: bool | None = None,
        submit: bool | None = None,
        check: bool = True,
    ) -> SplitModel:
        """Shards a model of mlx-lm, in place, and takes it over.

        Where :meth:`SplitBlock.from_layer` takes all its layers they become blocks, and the head is sharded by
        vocabulary, its logits gathered. Otherwise the model is sharded by :func:`mlxdist.nn.shard_model`, and with
        ``submit`` each sum is handed to MLX at once.

        Args:
            model: unsharded, of mlx-lm, the same on all ranks.
            group: the ranks to shard it over; ``None`` is the group of ``mlxdist.init()``.
            rank_shares, transposed, submit: as for a layer.
            check: compare logits with those of ``model``, at the start and, with caches that stand there, before and
                behind every number of positions that its configuration names. A collective.

        Raises:
            InvalidArgument: the model is sharded already, or cannot be sharded like this, or (``check``) computes
                something else. The same on all ranks.
            Mismatch: on all ranks, which have other layers.
        """
        group = group_of(group)
        wanted: list[mx.array] = []
        numbers = boundaries(getattr(model, "args", None))
        with agreed(NAME, group, numbers, described(model)):
            _require_unsharded(model)
            if check:
                wanted = logits_at(model, numbers)
            reason = _not_blocks(model, group.size(), rank_shares)
        agree(NAME, group, None, {"layers that can be blocks": reason})
        # A block of each kind of layers is compared with its layer, while the model is full. That is collective, but
        # all ranks come to the end of this block: they agree about each layer, with an exception on all or on none.
        with agreed(NAME, group):
            reason = reason or _wrong_blocks(model, group, rank_shares)
        if reason is None:
            with agreed(NAME, group):
                _into_blocks(model, group, rank_shares, transposed, submit)
            compare_inputs(model, group)
        else:
            _shard_own_layers(model, group, rank_shares, submit)
        split = create(cls, model, reason)
        if check:
            found = logits_at(split, numbers)
            with agreed(NAME, group):
                _require_close(found, wanted, numbers, split.model_type)
        return split

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the model: tokens, integers of shape (batch, length), give logits of shape (batch, length, vocabulary)
        in the model's dtype, the same on every rank."""
        return self.model(*arguments, **keywords)


def _require_unsharded(model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "layers"):
        raise InvalidArgument(f"SplitModel: {type(model).__name__} has no layers, as mlx-lm's models have")
    if isinstance(model, SplitModel) or any(isinstance(layer, SplitBlock) for layer in model.layers):
        raise InvalidArgument("SplitModel: the model was sharded already, which has taken its layers; load it again")


def _not_blocks(model: nn.Module, ranks: int, rank_shares: Sequence[float] | None) -> str | None:
    """Why the layers of a model cannot be blocks, by their shape; ``None`` where they can."""
    if (layers := _list_of_layers(model)) is None:
        return "SplitModel: the model has no list of its layers"
    try:
        for layer in layers:
            if list(inspect.signature(type(layer).__call__).parameters) != ["self", "x", "mask", "cache"]:
                raise InvalidArgument(f"SplitBlock: {type(layer).__name__} is not called with x, mask and cache alone")
            require_shardable(layer, ranks, rank_shares)
    except InvalidArgument as error:
        return str(error)
    return _reads_more(model, layers)


def _list_of_layers(model: nn.Module) -> list[nn.Module] | None:
    """The list that ``model.layers`` is, or is a copy of, to be written to."""
    wanted = [id(layer) for layer in model.layers]
    lists = (value for module in model.modules() for value in module.values() if isinstance(value, list))
    return next((value for value in lists if [id(one) for one in value] == wanted), None)


def _reads_more(model: nn.Module, layers: list[nn.Module]) -> str | None:
    """Why a block cannot stand for a layer: the model reads more attributes. None: it can. Tried with stand-ins."""
    full = list(layers)
    stand_ins: list[Any] = [_StandIn(layer) for layer in full]
    try:
        layers[:] = stand_ins
        model(mx.array([[0, 1]]))
    except AttributeError as error:
        return f"SplitModel: the model reads its layers: {error}"
    finally:
        layers[:] = full
    return None


class _StandIn:
    """A layer that shows no more of itself than a `SplitBlock` does."""

    def __init__(self, layer: nn.Module) -> None:
        self.__dict__.update(settings(layer))
        self._layer = layer

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self._layer(x, mask, cache)


def _wrong_blocks(model: nn.Module, group: Group, rank_shares: Sequence[float] | None) -> str | None:
    """Why layers cannot be blocks, by the results of one layer of each kind. Collective, the same on all ranks."""
    kinds = {tuple(type(module) for module in layer.modules()): layer for layer in reversed(model.layers)}
    for layer in kinds.values():
        try:
            SplitBlock.from_layer(layer, group=group, rank_shares=rank_shares, transposed=False, submit=False)
        except InvalidArgument as error:
            return str(error)
    return None


def _into_blocks(
    model: nn.Module, group: Group, rank_shares: Sequence[float] | None, transposed: bool | None, submit: bool | None
) -> None:
    layers = _list_of_layers(model) or []
    blocks: list[SplitBlock] = []
    for number, layer in enumerate(layers):
        tables = {id(table): table for table in map(table_of, blocks)}.values()
        blocks.append(
            SplitBlock.from_layer(
                layer,
                group=group,
                rank_shares=rank_shares,
                transposed=transposed,
                submit=submit,
                tables=tables,
                check=False,
            )
        )
        layers[number] = blocks[-1]
    shard_head(model, group, transposed)


def _shard_own_layers(model: nn.Module, group: Group, rank_shares: Sequence[float] | None, submit: bool | None) -> None:
    with agreed(NAME, group):
        plan = plan_shards(model, tp=group.size(), rank_shares=rank_shares)
        if group.size() > 1 and not plan.sharded:
            raise InvalidArgument("SplitModel: shard_model finds nothing in this model that it can shard")
    shard_model(model, plan, group=group)
    if mx.default_device() != mx.cpu if submit is None else submit:
        submit_sums(model)


def _require_close(found: list[mx.array], wanted: list[mx.array], numbers: list[int], model_type: str) -> None:
    error = np.max([relative_error(*pair) for pair in zip(found, wanted)])  # NaN if one is, unlike Python's max
    if not error <= TOLERANCE.get(wanted[0].dtype, 1e-3):
        raise InvalidArgument(
            f"SplitModel: its logits differ from those of the {model_type} by {error:.2g} of their norm, at the start "
            f"or near one of the positions {numbers}: a part of the model computes something else once sharded, or the "
            "ranks hold different weights"
        )
