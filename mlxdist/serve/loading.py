"""The model that a server computes with: sharded, and with the operator's additions."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_reduce

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.models.load import LoadReport, load_sharded
from mlxdist.nn.models.split_model import SplitModel
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group

from .adapters import AdaptedModel
from .log import say
from .options import ServeOptions
from .placement import ModelPlacement, show
from .quantized_cache import quantize_caches
from .speculation import DraftedModel
from .vocabulary import VocabParallelModel

__all__ = ["load"]


def load(options: ServeOptions, directory: Path, placement: ModelPlacement, group: Group) -> tuple[Any, Any]:
    """Loads the model, in the form that mlx-lm's generators call, and its tokenizer. Collective.

    Raises:
        InvalidArgument: on all ranks, what :func:`load_sharded` or ``SplitModel.from_model`` raises; there is no
            tokenizer; the draft model has another one; stages have a draft or a sharded vocabulary; there are no KV
            caches to quantize.
    """
    with agreed("serve", group):
        if placement.stage_plan is not None and (options.limits.num_draft_tokens or options.shard_vocabulary):
            raise InvalidArgument(
                "serve: drafts and --shard-vocabulary are for ranks that share every layer, not stages"
            )
    model: Any
    if options.split_blocks:
        model, tokenizer = _load_split(directory, placement, group)
    else:
        model, tokenizer = load_sharded(
            directory,
            group=group,
            plan=placement.plan,
            stage_plan=placement.stage_plan,
            adapter_path=[path for _, path in options.adapters] or options.adapter_path,
            stream=options.stream_weights,
            on_report=lambda report: show(placement, report, group),
        )
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
            model = DraftedModel(model, draft[0])
            if draft[1] is None or draft[1].get_vocab() != tokenizer.get_vocab():
                raise InvalidArgument(f"serve: the draft model {options.draft_model} has another tokenizer")
    return model, tokenizer


def _load_draft(options: ServeOptions, group: Group) -> tuple[nn.Module, Any] | None:
    if options.draft_model is None:
        return None
    if options.shard_draft_model:
        return load_sharded(options.draft_model, group=group, stream=options.stream_weights)
    return _load_alone(options.draft_model, group, lambda report: None)


def _load_alone(path: str | Path, group: Group, on_report: Callable[[LoadReport], Any]) -> tuple[nn.Module, Any]:
    """A model that is not sharded: each rank loads all of it."""
    alone = group.split(group.rank())
    assert alone is not None  # the color is not negative
    with agreed("serve", group):
        return load_sharded(path, group=alone, on_report=on_report)


def _load_split(directory: Path, placement: ModelPlacement, group: Group) -> tuple[nn.Module, Any]:
    """A `SplitModel` that is sharded from a full model on each rank, and compared with it."""
    start = time.perf_counter()
    reports: list[LoadReport] = []
    full, tokenizer = _load_alone(directory, group, reports.append)
    model = SplitModel.from_model(full, group=group, rank_shares=placement.plan.rank_shares)
    mx.eval(model.parameters())
    mx.clear_cache()  # of what the full model was
    held: int = tree_reduce(lambda total, array: total + array.nbytes, model.parameters(), 0)
    show(placement, replace(reports[0], bytes_held=held, seconds=time.perf_counter() - start), group)
    if model.why_not_blocks is not None and group.rank() == 0:
        say(f"the layers are mlx-lm's own, and not split: {model.why_not_blocks}")
    return model, tokenizer
