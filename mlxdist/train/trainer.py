"""The loop of `mlxdist train`."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.debug import NanGuard
from mlxdist.nn.context_parallel import shard_sequence
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.diagnostics.step import set_step
from mlxdist.runtime.group.default_group import init
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.mesh import mesh as make_mesh
from mlxdist.runtime.operations.collectives import all_sum

from .batches import Batches
from .checkpoint import Checkpoints
from .checkpoint.ranks import gather
from .clip_grad_norm import clip_grad_norm
from .config import TrainConfig
from .control import Control
from .datasets import load_dataset
from .fingerprint import Fingerprint
from .gradient_guard import GradientGuard
from .loss_alarm import LossAlarm
from .mixed_precision import MixedPrecision
from .model import make_model, make_optimizer, open_tokenizer, save_trained
from .preflight import RowCounts, check_folders, check_settings, check_tokens, count_rows, show
from .report import Report, is_due
from .router_balance import RouterBalance
from .rows import Dataset
from .saves import Saves
from .seeds import Seeds
from .throughput import Throughput
from .value_and_grad import value_and_grad

__all__ = ["TrainResult", "masked_loss", "train"]

# What begins from the start where these have changed.
_NEW_WITH = {"optimizer": {"optimizer", "precision"}, "batches": {"data", "tokenizer", "max_seq_length", "pack"}}


@dataclass(frozen=True)
class TrainResult:
    """The result of :func:`train`, the same on all ranks.

    Attributes:
        step: how many steps of the optimizer are done, with those before a restart.
        loss: the mean loss of the last step, over the tokens of all ranks; NaN: this call has made none.
        validation_loss: the last one; NaN for none.
        output: the folder of what was trained, on rank 0's host; None: the training ended before its last step.
    """

    step: int
    loss: float = math.nan
    validation_loss: float = math.nan
    output: Path | None = None


def train(config: TrainConfig | Mapping[str, Any], *, check: bool = False) -> TrainResult:
    """Trains a model of mlx-lm as a configuration says: `mlxdist train`, for programs.

    All ranks of the job call it, in their main thread, also a single one. Rank 0 prints what the command prints.

    Args:
        config: of the training, the same on all ranks but for paths; or a mapping as the command's TOML file is one.
        check: do what comes before the first step, which finds what is wrong, and print what is known then: memory,
            parameters, steps, tokens. Nothing is trained or written.

    Raises:
        InvalidArgument: the configuration is wrong, or does not fit the ranks, the model or the data. On all ranks,
            before any work.
        Mismatch: the ranks have different meshes, parameters or steps. On all ranks.
    """
    with agreed("train", init()):
        config = config if isinstance(config, TrainConfig) else TrainConfig.from_mapping(config)
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    with agreed("train", mesh.group):
        check_settings(config)
        check_folders(config)
    fingerprint = Fingerprint(config, mesh)
    tokenizer = open_tokenizer(config, mesh.group)
    seeds = Seeds(config.seed, mesh=mesh)
    batches, validation, counts = _batches(config, tokenizer, seeds.seed, mesh)
    model, flops = make_model(config, seeds.seed, mesh)
    check_tokens(counts, model, tokenizer, config, mesh)
    optimizer = make_optimizer(config, model, mesh)

    data = mesh["dp", "fsdp", "cp"]  # whose ranks have other tokens
    loss_of = partial(masked_loss, cp=mesh["cp"])
    mixed = optimizer if isinstance(optimizer, MixedPrecision) else None
    trained_loss: Callable = loss_of
    if config.router_aux_loss_coef:
        trained_loss = partial(loss_of, routers=RouterBalance(model), coefficient=config.router_aux_loss_coef)
    trained_loss = trained_loss if mixed is None else partial(_scaled_loss, trained_loss, mixed)
    loss_and_gradients = value_and_grad(
        model,
        trained_loss,
        mesh=mesh,
        micro_batches=config.grad_accumulation_steps,
        schedule=config.pipeline.schedule if mesh.size("pp") > 1 else None,
    )
    # A scaled loss has a guard of its own.
    guard = None if mixed is not None and mixed.is_scaled else GradientGuard(group=mesh.group)
    throughput = Throughput(flops(config.max_seq_length), recompute=float(config.grad_checkpoint), group=mesh.group)
    state = {"model": model, "optimizer": optimizer, "batches": batches, "seeds": seeds, "fingerprint": fingerprint}
    settings, micro_batches, stopped = config.checkpoints, config.grad_accumulation_steps, False
    loss: float | None = None
    validation_loss, output = math.nan, None
    with ExitStack() as stack:
        checkpoints = Checkpoints(
            settings.directory,
            mesh=mesh,
            keep=settings.keep,
            keep_every=settings.keep_every or None,
            trainable_only=True,
        )
        stack.enter_context(checkpoints)
        _resume(config, checkpoints, state)
        if not check or all(gather(Path(settings.directory).is_dir(), mesh.group)):
            checkpoints.lock(batches.step)
        if check:
            show(config, counts, model, optimizer, mesh)
            return TrainResult(batches.step)
        control = stack.enter_context(_control(config, mesh))
        saves = Saves(checkpoints, state, settings, mesh.group)
        report = stack.enter_context(Report(config, batches.step, mesh.group))
        every = config.control.nan_guard_every
        nan_guard = stack.enter_context(NanGuard(model, every, group=mesh.group)) if every else None

        def validate() -> None:
            nonlocal validation_loss
            if validation is not None:
                start = time.perf_counter()
                validation_loss = evaluate(model, loss_of, validation(), data, config.val_batches)
                report.validated(batches.step, validation_loss, time.perf_counter() - start)

        while batches.step < config.steps:
            decision = control.decide(batches.step, loss)
            if decision.save:
                report.saved(saves.save(batches.step, is_last=decision.stop))
            if stopped := decision.stop:
                break
            iteration, before = (step * micro_batches for step in (batches.step, batches.before(batches.step)))
            if batches.step == 0 or is_due(iteration, before, config.steps_per_eval):
                validate()
            batch, lengths = next(batches)
            seeds.set_step(batches.step)
            with throughput.step() as step:
                (mean, tokens), gradients = loss_and_gradients(model, batch, lengths)
                if mixed is not None:
                    mean, gradients = mean / mixed.loss_scale, mixed.unscale(gradients)
                clipped, norm = clip_grad_norm(gradients, config.max_grad_norm, model=model, mesh=mesh)
                mx.eval(norm)  # before what follows also on a stage that has nothing to train, and does not need it
                if guard is None or guard.check(gradients, norm=norm, loss=mean):
                    optimizer.update(model, clipped)
                computed = (lengths[:, 1] - 1).astype(mx.float32)
                parts = [mean * tokens, tokens, computed.sum(), computed.square().sum()]
                sums = all_sum(mx.stack([part.astype(mx.float32) for part in parts]), group=data)
                mx.eval(model.trainable_parameters(), optimizer.state, sums)
                step.tokens, step.computed = int(sums[1]), float(sums[2]) / mesh.size("cp")
                step.flops = flops(float(sums[3] / sums[2]))
                if nan_guard is not None:
                    nan_guard.check()
            loss = float(sums[0] / sums[1])
            set_step(batches.step, config.steps)
            report.trained(batches.step, loss, float(optimizer.learning_rate), float(norm), throughput)
        if not stopped:
            validate()
            report.saved(saves.save(batches.step, is_last=True))
            output = save_trained(config, model, checkpoints, mesh)
    return TrainResult(batches.step, math.nan if loss is None else loss, validation_loss, output)


def _resume(config: TrainConfig, checkpoints: Checkpoints, state: dict[str, Any]) -> None:
    """Goes on where the last checkpoint is, if there is one, with the learning rate of the configuration."""
    settings = config.checkpoints
    step = checkpoints.load({"fingerprint": state["fingerprint"]}, other_run=settings.resume)
    if step is None:
        return
    changed = state["fingerprint"].changes(settings.allow_changes)
    batches: Batches = state["batches"]
    fresh = {name for name, what in _NEW_WITH.items() if changed & what}
    checkpoints.load({name: part for name, part in state.items() if name not in fresh}, other_run=settings.resume)
    if "batches" in fresh:
        batches.restore(batches.state | {"step": step})
    if not config.lr_schedule:
        state["optimizer"].learning_rate = config.learning_rate


def masked_loss(
    model: nn.Module,
    batch: mx.array,
    lengths: mx.array,
    *,
    cp: Any,
    routers: RouterBalance | None = None,
    coefficient: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """The loss of this rank's part of each sequence, as mlx-lm's ``default_loss``: (mean cross entropy, targets).

    The padding behind the last token, which mlx-lm counts as one more target, is no target here: otherwise the loss
    would depend on how rows are divided over ranks, since a batch is padded to its longest row.

    Args:
        batch: token ids (rows, width), the same on all ranks of ``cp``.
        lengths: (rows, 2), as mlx-lm has them: the offset of the first target, and the number of tokens.
        cp: the ranks that share each sequence.
        routers: of the model, whose balance loss is added ``coefficient`` times, of each sequence by its targets.
    """
    steps = mx.arange(1, batch.shape[1])
    is_token = steps < lengths[:, 1:]
    mask = mx.logical_and(steps >= lengths[:, 0:1], is_token)
    parts = [batch[:, :-1], batch[:, 1:], mask]
    if cp.size() > 1:
        padding = -(batch.shape[1] - 1) % (2 * cp.size())
        parts = [shard_sequence(mx.pad(part, [(0, 0), (0, padding)]), 1, group=cp) for part in parts]
    inputs, targets, mask = parts
    with routers.watching(is_token) if routers else nullcontext():
        logits = model(inputs)
    losses = nn.losses.cross_entropy(logits, targets).astype(mx.float32) * mask
    tokens = mask.sum()
    loss = losses.sum() / mx.maximum(tokens, 1)
    return (loss + coefficient * routers.loss(mask.sum(1)) if routers else loss), tokens


def _scaled_loss(loss_of: Callable, mixed: MixedPrecision, *args: Any) -> tuple[mx.array, mx.array]:
    loss, tokens = loss_of(*args)
    return mixed.scale(loss), tokens


def evaluate(model: nn.Module, loss_of: Callable, batches: Batches, data: Group, count: int) -> float:
    """The mean loss of ``count`` batches, -1 for all, over the tokens of all ranks."""
    model.eval()
    total = mx.zeros(2)
    for batch, lengths in islice(batches, None if count < 0 else count):
        loss, tokens = loss_of(model, batch, lengths)
        total = total + mx.stack([loss * tokens, tokens.astype(mx.float32)])
        mx.eval(total)
    model.train()
    total = all_sum(total, group=data)
    return float(total[0] / total[1])


def _batches(
    config: TrainConfig, tokenizer: Any, seed: int, mesh: Mesh
) -> tuple[Batches, Callable[[], Batches] | None, dict[str, RowCounts]]:
    """Returns the batches to train with, a function that makes those to validate with, and the row counts of both."""
    counts: dict[str, RowCounts] = {}

    def load(split: str) -> Dataset:
        dataset = load_dataset(config.data, tokenizer, split, mask_prompt=config.mask_prompt, group=mesh.group)
        counts[split] = count_rows(split, dataset, tokenizer, config, mesh)
        return dataset

    make = partial(Batches, max_seq_length=config.max_seq_length, packed=config.pack, mesh=mesh)
    micro_batches = config.grad_accumulation_steps
    batches = make(
        load("train"),
        config.batch_size * micro_batches,
        seed=seed,
        micro_batches=micro_batches,
        rank_shares=None if config.rank_shares == "equal" else config.rank_shares,
        skip_steps=config.skip_steps,
    )
    if config.val_batches == 0 or not Path(config.data).is_dir():
        return batches, None, counts
    make_validation = partial(make, load("valid"), config.batch_size, shuffle=False, epochs=1)
    make_validation()  # what is wrong with it, before any work
    return batches, make_validation, counts


def _control(config: TrainConfig, mesh: Mesh) -> Control:
    settings = config.control
    return Control(
        group=mesh.group,
        kill_switch=settings.kill_file or None,
        save_switch=settings.save_file or None,
        save_every=config.checkpoints.every or None,
        save_every_seconds=config.checkpoints.every_minutes * 60 or None,
        max_seconds=settings.hours * 3600 or None,
        max_host_memory=settings.memory_share or None,
        min_device_memory=int(settings.device_memory_gib * 2**30) or None,
        loss_alarm=LossAlarm(),
    )
