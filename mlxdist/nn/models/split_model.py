"""A model of mlx-lm whose layers are `SplitBlock`s, or its own layers sharded, for mlx-lm's own generate."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.opaque import Opaque, create
from mlxdist.nn.models.plan import shard_model
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..pipeline_parallel.stage import calls_of, stage_of
from ..rank_checks import agree, agreed, described, texts
from ..split_block.decode_time import decode_seconds
from ..split_block.head import InPlaceOf, shard_head
from ..split_block.probes import boundaries, logits_at
from ..split_block.shard_layer import group_of_layer, require_shardable
from ..split_block.split_block import SplitBlock, relative_error, settings, table_of
from ..split_block.submissions import submit_sums
from ..tensor_parallel.linear_layers import ROW_SHARDED
from .plan import plan_shards

__all__ = ["ROWS_OF_A_SERVER", "SplitModel"]

ROWS_OF_A_SERVER = 8  # of the batch by which the layers of a server become blocks

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
        decode_seconds: the time of a decode step by a block and by mlx-lm's layer, the mean over the ranks, where
            ``if_faster_for`` has asked for it; else ``None``.
    """

    original = "model"
    _made_by = NAME

    def __init__(self, model: nn.Module, why_not_blocks: str | None, seconds: tuple[float, float] | None) -> None:
        super().__init__()
        self.model = model
        self.why_not_blocks = why_not_blocks
        self.decode_seconds = seconds

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
        if_faster_for: int | None = None,
        shard_vocabulary: bool = True,
    ) -> SplitModel:
        """Takes over a model of mlx-lm, in place: full, or of :func:`mlxdist.nn.load_sharded`.

        A full model is sharded by :func:`mlxdist.nn.shard_model` first. Where :meth:`SplitBlock.from_layer` takes all
        layers they become blocks, one after the other, so that a rank never holds more than its shard and one layer.
        Otherwise they stay as they are, and with ``submit`` each of their sums is handed to MLX at once.

        Args:
            model: of mlx-lm, the same on all ranks; full, or sharded by `shard_model`, also in stages and with
                low-rank adapters.
            group: all ranks of the model; ``None`` is the group of ``mlxdist.init()``.
            rank_shares, transposed, submit: as for a layer; ``rank_shares`` only for a full model.
            check: compare logits with those of ``model``, at the start and, with caches that stand there, before and
                behind every number of positions that its configuration names. A collective. Nothing is compared where
                the layers of a sharded model stay.
            if_faster_for: rows of a batch. Layers become blocks only where a decode step of that many rows takes less
                by them, measured by all ranks together. ``None``: wherever they can be blocks.
            shard_vocabulary: with blocks, shard the head by vocabulary, its logits gathered. ``False`` leaves it.

        Raises:
            InvalidArgument: the model is one of these already, or cannot be sharded like this, or (``check``) computes
                something else. The same on all ranks.
            Mismatch: on all ranks, which have other layers or arguments.
        """
        group = group_of(group)
        wanted: list[mx.array] = []
        numbers = boundaries(getattr(model, "args", None))
        compared: dict[str, object] = {}  # as it is behind the block
        with agreed(NAME, group, numbers, rank_shares, check, if_faster_for, shard_vocabulary, compared):
            _require_new(model, if_faster_for)
            sharded = _is_sharded(model)
            compared |= {"sharded": True} if sharded else described(model)
            if sharded and rank_shares is not None:
                raise InvalidArgument("SplitModel: the model is sharded already; leave out rank_shares")
            if check and not sharded:
                wanted = logits_at(model, numbers)
        if not sharded:
            _shard(model, group, rank_shares)
        if mx.default_device() != mx.cpu if submit is None else submit:
            submit_sums(model)
        with agreed(NAME, group):
            reason = _not_blocks(model)
        reason, times = _first(reason, group), None
        if reason is None:
            form = _Form(transposed, submit, _alone(model, group))
            reason = _first(_wrong_blocks(model, form, group), group)
        if reason is None and if_faster_for is not None:
            times = _decode_seconds(model, form, if_faster_for, group)
            reason = _slower(*times, if_faster_for)
        if reason is None:
            if sharded and check:  # ranks add up, which they must not do within an agreed block
                wanted = logits_at(model, numbers)
            with agreed(NAME, group):
                _into_blocks(model, form, shard_vocabulary)
        split = create(cls, model, reason, times)
        if wanted:
            found = logits_at(split, numbers)
            with agreed(NAME, group):
                _require_close(found, wanted, numbers, split.model_type)
        return split

    @property
    def described_layers(self) -> str:
        """The form of the layers and its reason: "split blocks: ..." or "mlx-lm's own, and not split: ..."."""
        if self.why_not_blocks is not None:
            return f"mlx-lm's own, and not split: {self.why_not_blocks}"
        if self.decode_seconds is None:
            return "split blocks"
        block, layer = (1e3 * seconds for seconds in self.decode_seconds)
        return f"split blocks: {block:.2f} ms a layer and decode step, not {layer:.2f}"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the model: tokens, integers of shape (batch, length), give logits of shape (batch, length, vocabulary)
        in the model's dtype, the same on every rank."""
        return self.model(*arguments, **keywords)


class _Form(NamedTuple):
    """The form of a model's blocks: ``transposed`` and ``submit`` as for a layer, and the group of a layer that each
    rank, or each stage, has in full."""

    transposed: bool | None
    submit: bool | None
    alone: Group

    def block(self, layer: nn.Module, **options: Any) -> SplitBlock:
        return SplitBlock.from_layer(layer, group=self.alone, transposed=self.transposed, submit=self.submit, **options)


def _require_new(model: nn.Module, rows: int | None) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "layers"):
        raise InvalidArgument(f"SplitModel: {type(model).__name__} has no layers, as mlx-lm's models have")
    if isinstance(model, SplitModel) or any(isinstance(layer, SplitBlock) for layer in model.layers):
        raise InvalidArgument("SplitModel: the layers of the model are blocks already; load it again")
    if rows is not None and (type(rows) is not int or rows < 1):
        raise InvalidArgument(f"SplitModel: if_faster_for is a number of rows, not {rows!r}")


def _is_sharded(model: nn.Module) -> bool:
    return stage_of(model) is not None or any(
        "_region" in vars(module) or isinstance(module, ROW_SHARDED) for module in model.modules()
    )


def _shard(model: nn.Module, group: Group, rank_shares: Sequence[float] | None) -> None:
    with agreed(NAME, group):
        plan = plan_shards(model, tp=group.size(), rank_shares=rank_shares)
        if group.size() > 1 and not plan.sharded:
            raise InvalidArgument("SplitModel: shard_model finds nothing in this model that it can shard")
    shard_model(model, plan, group=group)


def _alone(model: nn.Module, group: Group) -> Group:
    """A group of this rank, where some rank has a layer in full; else ``group``. Collective."""
    full = [number for number in _own_layers(model) if group_of_layer(model.layers[number]) is None]
    if group.size() == 1 or not agree(NAME, group, None, {}, [len(full)]).any():
        return group
    alone = group.split(group.rank())
    assert alone is not None  # the color is not negative
    return alone


def _own_layers(model: nn.Module) -> list[int]:
    """The numbers of the layers that this rank computes."""
    stage = stage_of(model)
    return [*range(len(model.layers))] if stage is None else [number for chunk in stage.chunks for number in chunk]


def _first(reason: str | None, group: Group) -> str | None:
    """The reason of the first rank that has one. Collective."""
    return next(filter(None, texts(reason or "", group) if group.size() > 1 else [reason]), None)


def _not_blocks(model: nn.Module) -> str | None:
    """Why the layers of a model cannot be blocks, by their shape; ``None`` where they can."""
    if (layers := _list_of_layers(model)) is None:
        return "SplitModel: the model has no list of its layers"
    try:
        for layer in (layers[number] for number in _own_layers(model)):
            if list(inspect.signature(type(layer).__call__).parameters) != ["self", "x", "mask", "cache"]:
                raise InvalidArgument(f"SplitBlock: {type(layer).__name__} is not called with x, mask and cache alone")
            require_shardable(layer, 1, None)
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
    full, stage = list(layers), stage_of(model)
    stand_ins: list[Any] = [_StandIn(layer) for layer in full]
    call = partial(model, mx.array([[0, 1]]))
    try:
        layers[:] = stand_ins
        if stage is None:
            call()
        else:
            calls_of(stage).shape_of_call(call)
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

    def __call__(self, *arguments: Any, **keywords: Any) -> mx.array:
        return self._layer(*arguments, **keywords)


def _kinds(model: nn.Module) -> list[nn.Module]:
    """Returns one of this rank's layers of each kind."""
    layers = [model.layers[number] for number in reversed(_own_layers(model))]
    # By their names: each layer of a stage has a class of its own, with the name of mlx-lm's.
    names = [tuple((type(one).__module__, type(one).__qualname__) for one in layer.modules()) for layer in layers]
    return list(dict(zip(names, layers)).values())


def _wrong_blocks(model: nn.Module, form: _Form, group: Group) -> str | None:
    """Why layers cannot be blocks, by the results of one layer of each kind. Collective.

    Raises another exception than that of a layer which cannot be one as `agreed` does, on all ranks.
    """
    failure: Exception | None = None
    try:
        for layer in _kinds(model):
            form._replace(transposed=False, submit=False).block(layer)
    except Exception as error:  # the ranks that do not share this layer wait for the outcome
        failure = error
    with agreed(NAME, group):
        if failure is not None and not isinstance(failure, InvalidArgument):
            raise failure
    return None if failure is None else str(failure)


def _decode_seconds(model: nn.Module, form: _Form, rows: int, group: Group) -> tuple[float, float]:
    """The time of a decode step by a block and by a layer: the mean over kinds of layers and over the ranks."""
    found = []
    for layer in _kinds(model):
        norm = layer.input_layernorm.weight
        found.append(decode_seconds([form.block(layer, check=False), layer], rows, norm.size, norm.dtype))
    nanoseconds = np.array(found).mean(axis=0) * 1e9
    every = agree(NAME, group, None, {}, nanoseconds.astype(np.int64).tolist())
    block, layer = (every.mean(axis=0) / 1e9).tolist()
    return block, layer


def _slower(block: float, layer: float, rows: int) -> str | None:
    """Why blocks do not pay; ``None`` where they do."""
    if block < layer:
        return None
    return f"a decode step of {rows} rows takes {block * 1e3:.2f} ms a layer by blocks, and {layer * 1e3:.2f} without"


def _into_blocks(model: nn.Module, form: _Form, shard_vocabulary: bool) -> None:
    layers, stage = _list_of_layers(model) or [], stage_of(model)
    tables: dict[int, Any] = {}
    for number in _own_layers(model):
        row = group_of_layer(layers[number]) or form.alone
        block = form.block(layers[number], tables=tables.values(), check=False)
        tables[id(table_of(block))] = table_of(block)
        if stage is not None:
            calls_of(stage).route(block, number)
        layers[number] = block  # and what it was made of goes, before the next layer
    if shard_vocabulary:
        shard_head(model, row, form.transposed)
    mx.clear_cache()  # of what the layers were


def _require_close(found: list[mx.array], wanted: list[mx.array], numbers: list[int], model_type: str) -> None:
    error = np.max([relative_error(*pair) for pair in zip(found, wanted)])  # NaN if one is, unlike Python's max
    if not error <= TOLERANCE.get(wanted[0].dtype, 1e-3):
        raise InvalidArgument(
            f"SplitModel: its logits differ from those of the {model_type} by {error:.2g} of their norm, at the start "
            f"or near one of the positions {numbers}: a part of the model computes something else once sharded, or the "
            "ranks hold different weights"
        )
