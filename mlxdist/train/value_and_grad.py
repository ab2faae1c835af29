"""Data-parallel training that communicates while it computes."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.pipeline_parallel import Schedule, Stage, pipeline_schedule
from mlxdist.nn.pipeline_parallel.stage import stage_of
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.operations.arguments import group_of

from .full_model_gradients import FullModelGradients
from .gradient_averaging import NAME, Averaging
from .gradient_buckets import DEFAULT_BUCKET_BYTES, check_reduce_dtype
from .pipeline_gradients import PipelineGradients
from .step_gradients import GradientSums, StepGradients
from .step_loss import StepLoss

__all__ = ["value_and_grad"]

_DATA_AXES = ("dp", "fsdp", "cp")  # along which ranks have other data, so other gradients of the same parameters


def value_and_grad(
    model: nn.Module,
    fn: Callable[..., Any],
    *,
    group: GroupLike | None = None,
    mesh: Mesh | None = None,
    micro_batches: int = 1,
    all_reduce_size: int = DEFAULT_BUCKET_BYTES,
    reduce_dtype: mx.Dtype | None = None,
    schedule: str | Schedule | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """MLX's ``nn.value_and_grad`` for ranks that have parts of a batch each: the gradients are those of all of it.

    Gradients are packed into buckets, and a bucket leaves when the backward pass has computed it, while that goes on
    (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704). The first call finds the order in which gradients become
    ready; all ranks take that of rank 0, until the trainable parameters change. n ranks send 2 (n - 1) / n of the
    bytes of the trainable parameters each, and in ``reduce_dtype``. Frozen parameters are not sent.

    Parameters of :func:`fully_shard` are averaged by it over its group, and here over the other axes of ``mesh`` alone.

    A model of :func:`pipeline_parallel` is trained by a schedule of ``micro_batches``. All ranks of
    ``mesh["pp"]`` have the same arguments, and call ``fn``, which calls the model once: there the model is this rank's
    stage, and what ``fn`` computes after it counts on the last one alone. Each stage adds terms of the loss that are
    made of parameters, or of activations inside the model, by :func:`stage_loss`. Gradients of a parameter that
    several stages hold (an embedding that is the head, too) are added up.

    The call returns while it still computes, as ``mx.async_eval`` does. It cannot be inside ``mx.compile``; what
    ``fn`` calls can.

    Args:
        model: the trainable parameters have the same paths, shapes and dtypes on all ranks.
        fn: its result is the loss, the mean of this rank's batch; or a tuple of that and the number of tokens (or
            samples) which it is the mean of, as mlx-lm's ``default_loss`` returns it, and of anything else. (The loss
            of no tokens may be NaN; with :func:`fully_shard` and ``context_parallel`` only if it is made of what
            ``model(...)`` returns.) With tokens the gradients are those of the mean over the tokens of all ranks: ranks
            may have unequal shares, also none; gradients are zero if no rank has any. That takes one more message of
            4 bytes. Without, all ranks count the same.
        group: the ranks to average over; ``None``, without ``mesh``, is the group of ``mlxdist.init()``.
        mesh: instead of ``group``: averaged over its axes dp, fsdp and cp.
        micro_batches: into how many the arrays among the arguments are split, along their first axis. Their gradients
            are added up, those of 16 bits in float32, and averaged over the ranks with the last one.
        all_reduce_size: how many bytes share one message at most; 32 MiB by default. At 0, each leaf travels alone.
        reduce_dtype: in which gradients travel and are added up. ``None``: those of float16 and bfloat16 in float32,
            the others in their own.
        schedule: of a model in stages: the name of a :func:`pipeline_schedule`, or one of your own; ``None`` is "1f1b".

    Returns:
        A function with the arguments of ``fn``. It returns what ``fn`` does for this rank's batch (of micro-batches:
        the mean loss, all tokens, and a list of each other value), and the gradients: a tree as
        ``model.trainable_parameters()``, bitwise the same on all ranks.

        It raises InvalidArgument, on all ranks, if in the first call ``fn`` fails on one, or stages would lose a term
        of the loss that :func:`stage_loss` does not give; if arrays do not divide into micro-batches; if the tokens
        are not one number. It raises Mismatch, on all ranks and with the first parameter that differs, if in the first
        call, or after parameters were frozen, the ranks' parameters, their dtypes or which of them are frozen differ.
        An error of ``fn`` in a later call on one rank ends the operations of all: the others raise Aborted with its
        text.

    Raises:
        InvalidArgument: on all ranks: an argument is not what it should be on one of them.
        Mismatch: on all ranks: options differ.
    """
    stage = stage_of(model)
    if mesh is not None and group is None:
        axes = {name: mesh[name] for name in _DATA_AXES if mesh.size(name) > 1}
        everyone = mesh[_DATA_AXES]
    else:
        everyone = group_of(group)
        axes = {"group": everyone} if everyone.size() > 1 else {}
    actions: Schedule | None = None
    options = {"micro_batches": micro_batches, "all_reduce_size": all_reduce_size, "reduce_dtype": reduce_dtype}
    # Its str() is a picture, which two schedules may share, and which one that deadlocks has not.
    with agreed(NAME, everyone if mesh is None else mesh.group, options | {"schedule": repr(schedule)}):
        _check(model, fn, group is not None and mesh is not None, micro_batches, all_reduce_size)
        check_reduce_dtype(NAME, reduce_dtype)
        if stage is None and schedule is not None:
            raise InvalidArgument(f"{NAME}: a schedule is for a model in stages; call pipeline_parallel(model) first")
        if stage is not None and stage.stages > 1:
            actions = _schedule_of(model, stage, mesh, schedule, micro_batches)
    averaging = Averaging(model, everyone, axes, mesh, all_reduce_size, reduce_dtype)

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        loss = StepLoss(averaging, fn, micro_batches)
        sums: GradientSums
        if actions is not None and stage is not None:
            sums = PipelineGradients(loss, actions, stage)
        else:
            sums = FullModelGradients(loss)
        return StepGradients(loss, sums).run(args, kwargs)

    return call


def _schedule_of(
    model: nn.Module, stage: Stage, mesh: Mesh | None, schedule: str | Schedule | None, micro_batches: int
) -> Schedule:
    """The schedule of a model in stages, checked."""
    if mesh is None or mesh["pp"] is not stage.group:
        raise InvalidArgument(f'{NAME}: a model in stages needs mesh=, whose axis pp is that of the stages: mesh["pp"]')
    virtual = len(stage.chunks)
    if schedule is None or isinstance(schedule, str):
        schedule = pipeline_schedule(schedule or "1f1b", stage.stages, micro_batches, virtual)
    if not isinstance(schedule, Schedule):
        raise InvalidArgument(f"{NAME}: schedule must be a Schedule or its name, not {schedule!r:.80}")
    asked, has = (stage.stages, micro_batches, virtual), (schedule.stages, schedule.micro_batches, schedule.virtual)
    if asked != has:
        raise InvalidArgument(
            f"{NAME}: the schedule is for {has[0]} stages, {has[1]} micro-batches and {has[2]} virtual stages, and "
            f"there are {asked[0]}, micro_batches={asked[1]} and {asked[2]}"
        )
    schedule.check()
    for path, module in model.named_modules():
        if (unit := getattr(module, "_unit", None)) is not None and unit.stage != 1:
            raise InvalidArgument(
                f"{NAME}: '{path}' is sharded by fully_shard(stage={unit.stage}), which would reduce its gradients "
                f"after each micro-batch, {micro_batches} times a step, while other stages wait for it; take stage=1"
            )
    return schedule


def _check(model: Any, fn: Any, both: bool, micro_batches: Any, all_reduce_size: Any) -> None:
    if both:
        raise InvalidArgument(f"{NAME}: give either group or mesh; a mesh says what its axes dp, fsdp and cp are")
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"{NAME}: model must be an nn.Module, not a {type(model).__name__}")
    if not callable(fn):
        raise InvalidArgument(f"{NAME}: fn must be a function that returns the loss, not a {type(fn).__name__}")
    if type(micro_batches) is not int or micro_batches < 1:
        raise InvalidArgument(f"{NAME}: micro_batches is {micro_batches!r}; give a number of micro-batches from 1")
    if type(all_reduce_size) is not int or all_reduce_size < 0:
        raise InvalidArgument(f"{NAME}: all_reduce_size is {all_reduce_size!r}; give a number of bytes from 0")
