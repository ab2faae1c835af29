"""The model that a server computes with: sharded, and with the operator's additions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.models.load import LoadReport, load_sharded
from mlxdist.nn.models.mtp_head import load_mtp_head
from mlxdist.nn.models.split_model import ROWS_OF_A_SERVER, SplitModel
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group

from .adapters import AdaptedModel
from .draft_model import DraftedModel
from .log import say
from .mtp import Backbone, MtpModel
from .options import ServeOptions
from .placement import ModelPlacement
from .quantized_cache import quantize_caches
from .vocabulary import VocabParallelModel

__all__ = ["load"]


def load(
    options: ServeOptions,
    directory: Path,
    placement: ModelPlacement,
    group: Group,
    on_report: Callable[[LoadReport], object],
    inspect: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[Any, Any]:
    """Loads the model, in the form that mlx-lm's generators call, and its tokenizer. Collective.

    ``on_report``: as of :func:`load_sharded`. ``inspect``: called with the sharded model of mlx-lm.

    Raises:
        InvalidArgument: on all ranks, what :func:`load_sharded` or ``SplitModel.from_model`` raises; there is no
            tokenizer; the draft model has another one; the model has no MTP head; there are no KV caches to quantize.
    """
    head = None
    if options.mtp:  # before the model, which takes longer
        head = load_mtp_head(directory, placement.plan, group=group, stream=options.stream_weights)
    model: Any
    model, tokenizer = load_sharded(
        directory,
        group=group,
        plan=placement.plan,
        stage_plan=placement.stage_plan,
        adapter_path=[path for _, path in options.adapters] or options.adapter_path,
        stream=options.stream_weights,
        on_report=on_report,
    )
    plain = model
    with agreed("serve", group):
        inspect(model)
    model = _with_blocks("the model's layers", model, options, group)
    draft = _load_draft(options, group)
    # Before the models below, which make their prompt caches from those of the models inside them.
    if options.kv_bits is not None:
        with agreed("serve", group):
            for each in (model, draft[0]) if draft else (model,):
                quantize_caches(each, options.kv_group_size, options.kv_bits)
    if options.adapters:
        model = AdaptedModel(model)
    if options.shard_vocabulary and group.size() > 1:
        model = VocabParallelModel(model, group)
    with agreed("serve", group):
        if tokenizer is None:
            raise InvalidArgument(f"serve: {options.model} has no tokenizer")
        if draft is not None:
            model = DraftedModel(model, draft[0], model if isinstance(model, VocabParallelModel) else None)
            if draft[1] is None or draft[1].get_vocab() != tokenizer.get_vocab():
                raise InvalidArgument(f"serve: the draft model {options.draft_model} has another tokenizer")
        if head is not None:
            model = MtpModel(model, head, Backbone(plain.model))
    return model, tokenizer


def _with_blocks(name: str, model: nn.Module, options: ServeOptions, group: Group) -> nn.Module:
    """The model with split blocks as layers, where it can have them and they are faster, or the operator asks for them;
    rank 0 says what it has. Collective."""
    if options.split_blocks is False:
        return model
    rows = min(ROWS_OF_A_SERVER, options.limits.decode_concurrency)
    split = SplitModel.from_model(
        model,
        group=group,
        if_faster_for=None if options.split_blocks else rows,
        shard_vocabulary=not options.shard_vocabulary,
    )
    if group.rank() == 0:
        say(f"{name} are {split.described_layers}")
    return split


def _load_draft(options: ServeOptions, group: Group) -> tuple[nn.Module, Any] | None:
    if options.draft_model is None:
        return None
    if options.shard_draft_model:
        draft, tokenizer = load_sharded(options.draft_model, group=group, stream=options.stream_weights)
        return _with_blocks("the draft model's layers", draft, options, group), tokenizer
    # Each rank loads all of it, and keeps its layers: ranks that chose alone would round, and so draft, differently.
    alone = group.split(group.rank())
    assert alone is not None  # the color is not negative
    with agreed("serve", group):
        return load_sharded(options.draft_model, group=alone)
