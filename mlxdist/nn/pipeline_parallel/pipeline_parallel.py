"""Makes a model of mlx-lm a stage of a pipeline, in place."""

from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.interception import intercept
from mlxdist.nn.rank_checks import agree, agreed, described
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of

from .layers import Layers, find_layers
from .missing_layers import drop_layer, drop_parameters
from .stage import Stage, calls_of, make_stage, stage_of
from .stage_plan import StagePlan, plan_of_layers, stages_of

__all__ = ["pipeline_parallel"]

M = TypeVar("M", bound=nn.Module)


def pipeline_parallel(model: M, *, group: GroupLike | None = None, stage_plan: StagePlan | None = None) -> M:
    """Makes this rank's stage of a model of mlx-lm, in place. Collective; no parameter is evaluated.

    ``model(tokens, cache=...)``, called by all ranks with the same arguments, then returns the logits of the full
    model on all ranks, and a rank computes no more than its own layers. So mlx-lm's commands and generators work as
    they are: caches have an entry for each layer, and those of other stages' layers hold no keys and values.
    ``model.stage`` is the :class:`Stage`, for loops that keep several batches on their way. ``model.parameters()`` are
    those of this stage. Shard layers first (:func:`shard_model`), and call mlx-lm's ``grad_checkpoint`` first.

    Args:
        model: full, or with layers that are sharded over other ranks than those of ``group``.
        group: the ranks, one for each stage, such as ``mesh["pp"]``; ``None`` is the group of ``mlxdist.init()``.
        stage_plan: of :func:`plan_stages`, the same on all ranks; ``None`` makes one with stages of equal parameters.

    Returns:
        ``model``. In a group of one it keeps all parameters; its calls and those of its layers go by way of
        ``model.stage``, which can have virtual stages there, too.

    Raises:
        InvalidArgument: the model has no stages, as :func:`plan_stages` says; the plan is none, or for another model or
            number of ranks. The same on all ranks; the model is unchanged.
        Mismatch: the ranks have different plans, or models with other parameters, dtypes or frozen ones.
    """
    group = group_of(group)
    layers: Any = None
    given: list[str] = []  # compared as it is behind the block
    with agreed("pipeline_parallel", group, given, described(model)):
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"pipeline_parallel: model must be an mlx.nn.Module, not {type(model).__name__}")
        if stage_plan is not None and not isinstance(stage_plan, StagePlan):
            raise InvalidArgument(
                f"pipeline_parallel: stage_plan must be a StagePlan of plan_stages, not {type(stage_plan).__name__}"
            )
        given += [stage_plan.to_json()] if stage_plan else []
        if stage_of(model) is not None:
            raise InvalidArgument("pipeline_parallel: the model is a stage already")
        layers = find_layers(model)
        stage_plan = stage_plan or plan_of_layers(model, layers, group.size())
        stage_plan.check(model, layers)
        if stage_plan.stages != group.size():
            raise InvalidArgument(
                f"pipeline_parallel: the plan has {stage_plan.stages} stages, and the group {group.size()} ranks"
            )
    assert stage_plan is not None
    # Compared once, here, so that no message between stages needs a header.
    agree("pipeline_parallel", group, None, {"arrays between layers": layers.taken})
    stage = make_stage(model, layers, stage_plan, group)
    _routed(model, stage, layers)
    _drop_others(model, stage, layers)
    return model


def _routed(model: Any, stage: Stage, layers: Layers) -> None:
    """Routes the calls of each layer, and those of the model, through the stage."""

    def call_model(kind: Any, model: nn.Module, tokens: mx.array, *args: Any, **keywords: Any) -> Any:
        return calls.connected(tokens, *args, **keywords)

    calls = calls_of(stage)
    for number, layer in enumerate(model.layers):
        calls.route(layer, number)
    intercept(model, __call__=call_model)
    model.stage = stage


def _drop_others(model: Any, stage: Stage, layers: Layers) -> None:
    """Takes out of the model what other stages hold."""
    for number, layer in enumerate(model.layers):
        if not any(number in chunk for chunk in stage.chunks):
            drop_layer(layer)
    modules = dict(model.named_modules())
    for path, when in layers.outside.items():
        if stage.index not in stages_of(when, stage.stages):
            drop_parameters(modules[path])
