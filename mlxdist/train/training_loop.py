"""The loop of `mlxdist train`, on the ranks of one group: a new one is made where ranks are lost or join."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.debug import NanGuard
from mlxdist.nn.context_parallel import shard_sequence
from mlxdist.runtime.diagnostics.step import set_step
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.operations.collectives import all_sum

from .batches import Batches
from .checkpoint import Checkpoints
from .clip_grad_norm import clip_grad_norm
from .config import TrainConfig
from .control import Control
from .elastic import InMemoryCheckpoint
from .fingerprint import Fingerprint
from .flops import FlopsPerToken
from .gradient_guard import GradientGuard
from .loss_alarm import LossAlarm
from .mixed_precision import MixedPrecision
from .model import make_optimizer, save_trained
from .preflight import RowCounts
from .report import Report, is_due
from .router_balance import RouterBalance
from .rows import Dataset
from .saves import Saves
from .seeds import Seeds
from .throughput import Throughput
from .value_and_grad import value_and_grad

__all__ = ["Prepared", "TrainingLoop", "masked_loss"]

# What begins from the start where these have changed.
_NEW_WITH = {"optimizer": {"optimizer", "precision"}, "batches": {"data", "tokenizer", "max_seq_length", "pack"}}


@dataclass(frozen=True)
class Prepared:
    """What is made once, and stays where the group changes: to make it takes long, and it has no group.

    Attributes:
        datasets, counts: by split, "train" and "valid"; without the latter there is no validation.
        flops: the cost of a token, by the length of its row.
        routers: of the model, if their balance counts.
    """

    fingerprint: Fingerprint
    datasets: Mapping[str, Dataset]
    counts: Mapping[str, RowCounts]
    model: nn.Module
    flops: Callable[[float], FlopsPerToken]
    routers: RouterBalance | None


class TrainingLoop:
    """The training on the ranks of a mesh, and all that is made for them. They make it together.

    Args:
        config: of the training.
        prepared: what stays where the group changes.
        mesh: the ranks.
        seeds: made of the mesh.
        memory: the state in memory of a job whose ranks may be lost and join; ``None`` for another job.

    Attributes:
        batches: with the step that the training is at, or has begun.
        loss: of the last step; ``None``: there was none.
        validation_loss: the last one; NaN for none.

    Raises:
        InvalidArgument: on all ranks: the configuration does not fit the ranks.
    """

    def __init__(
        self, config: TrainConfig, prepared: Prepared, mesh: Mesh, seeds: Seeds, memory: InMemoryCheckpoint | None
    ) -> None:
        self._config, self._prepared, self._mesh, self._seeds, self._memory = config, prepared, mesh, seeds, memory
        # Rows for any number of ranks: one part may have a row more than another.
        parts = None if memory is None else [1] * mesh.size("dp")
        self.batches, self._make_validation = _make_batches(config, prepared.datasets, seeds.seed, mesh, parts)
        self._model = model = prepared.model
        model.train()  # a validation may have been interrupted
        self.optimizer = make_optimizer(config, model, mesh)
        self._data = mesh["dp", "fsdp", "cp"]  # whose ranks have other tokens
        self._loss_of = partial(masked_loss, cp=mesh["cp"])
        self._mixed = self.optimizer if isinstance(self.optimizer, MixedPrecision) else None
        self._loss_and_gradients = value_and_grad(
            model,
            self._trained_loss(),
            mesh=mesh,
            micro_batches=config.grad_accumulation_steps,
            schedule=config.pipeline.schedule if mesh.size("pp") > 1 else None,
        )
        # A scaled loss has a guard of its own.
        is_scaled = self._mixed is not None and self._mixed.is_scaled
        self._guard = None if is_scaled else GradientGuard(group=mesh.group)
        flops = prepared.flops(config.max_seq_length)
        self._throughput = Throughput(flops, recompute=float(config.grad_checkpoint), group=mesh.group)
        settings = config.checkpoints
        self.checkpoints = Checkpoints(
            settings.directory,
            mesh=mesh,
            keep=settings.keep,
            keep_every=settings.keep_every or None,
            trainable_only=True,
        )
        self._state = {
            "model": model,
            "optimizer": self.optimizer,
            "batches": self.batches,
            "seeds": seeds,
            "fingerprint": prepared.fingerprint,
        }
        self._in_memory = {**self._state, "checkpoints": self.checkpoints}
        self._was_in_memory = False
        self.loss: float | None = None
        self.validation_loss = math.nan

    def restore(self) -> None:
        """Goes on from the last step that is in memory; else from the last checkpoint, if there is one."""
        self._was_in_memory = self._memory is not None and self._memory.load(self._in_memory) is not None
        if not self._was_in_memory:
            _resume(self._config, self.checkpoints, self._state, self._mesh.group)

    def make_control(self, previous: Control | None) -> Control:
        """Makes the control; ``previous`` is that of the group before."""
        settings = self._config.control
        saves = self._config.checkpoints
        return Control(
            group=self._mesh.group,
            kill_switch=settings.kill_file or None,
            save_switch=settings.save_file or None,
            save_every=saves.every or None,
            save_every_seconds=saves.every_minutes * 60 or None,
            max_seconds=settings.hours * 3600 or None,
            max_host_memory=settings.memory_share or None,
            min_device_memory=int(settings.device_memory_gib * 2**30) or None,
            loss_alarm=LossAlarm(),
            # Not the step of the restart: the loss of a rank may have interrupted a save.
            saved=(self.checkpoints.latest() or 0) if self._was_in_memory else None,
            previous=previous,
        )

    def run(self, control: Control, report: Report) -> Path | None:
        """Trains to the last step, or until the control says stop. Returns the folder of what was trained, if all is
        done."""
        config, batches = self._config, self.batches
        saves = Saves(self.checkpoints, self._state, config.checkpoints, self._mesh.group)
        every = config.control.nan_guard_every
        with NanGuard(self._model, every, group=self._mesh.group) if every else nullcontext() as nan_guard:
            self._keep()
            while batches.step < config.steps:
                decision = control.decide(batches.step, self.loss)
                if decision.save:
                    report.saved(saves.save(batches.step, is_last=decision.stop))
                if decision.stop:
                    return None
                if self._is_validation_due():
                    self._validate(report)
                norm = self._step(nan_guard)
                set_step(batches.step, config.steps)
                rate = float(self.optimizer.learning_rate)
                report.trained(batches.step, self.loss or 0.0, rate, norm, self._throughput)
                self._keep()
            self._validate(report)
            report.saved(saves.save(batches.step, is_last=True))
            return save_trained(config, self._model, self.checkpoints, self._mesh, again=self._memory is not None)

    def _trained_loss(self) -> Callable:
        loss: Callable = self._loss_of
        if self._prepared.routers is not None:
            loss = partial(loss, routers=self._prepared.routers, coefficient=self._config.router_aux_loss_coef)
        return loss if self._mixed is None else partial(_scaled_loss, loss, self._mixed)

    def _keep(self) -> None:
        """Keeps the state of this step in memory, if ranks may be lost; here they may also join."""
        if self._memory is not None:
            self._memory.save(self.batches.step, self._in_memory)

    def _step(self, nan_guard: NanGuard | None) -> float:
        """Does a step. Returns the norm of its gradients, before it is clipped."""
        config, mesh, model, mixed = self._config, self._mesh, self._model, self._mixed
        batch, lengths = next(self.batches)
        self._seeds.set_step(self.batches.step)
        with self._throughput.step() as step:
            (mean, tokens), gradients = self._loss_and_gradients(model, batch, lengths)
            if mixed is not None:
                mean, gradients = mean / mixed.loss_scale, mixed.unscale(gradients)
            clipped, norm = clip_grad_norm(gradients, config.max_grad_norm, model=model, mesh=mesh)
            mx.eval(norm)  # before what follows also on a stage that has nothing to train, and does not need it
            if self._guard is None or self._guard.check(gradients, norm=norm, loss=mean):
                self.optimizer.update(model, clipped)
            computed = (lengths[:, 1] - 1).astype(mx.float32)
            parts = [mean * tokens, tokens, computed.sum(), computed.square().sum()]
            sums = all_sum(mx.stack([part.astype(mx.float32) for part in parts]), group=self._data)
            mx.eval(model.trainable_parameters(), self.optimizer.state, sums)
            step.tokens, step.computed = int(sums[1]), float(sums[2]) / mesh.size("cp")
            step.flops = self._prepared.flops(float(sums[3] / sums[2]))
            if nan_guard is not None:
                nan_guard.check()
        self.loss = float(sums[0] / sums[1])
        return float(norm)

    def _is_validation_due(self) -> bool:
        step, per_step = self.batches.step, self._config.grad_accumulation_steps
        before = self.batches.before(step)
        return step == 0 or is_due(step * per_step, before * per_step, self._config.steps_per_eval)

    def _validate(self, report: Report) -> None:
        if self._make_validation is not None:
            start = time.perf_counter()
            batches = self._make_validation()
            self.validation_loss = _evaluate(self._model, self._loss_of, batches, self._data, self._config.val_batches)
            report.validated(self.batches.step, self.validation_loss, time.perf_counter() - start)


def _resume(config: TrainConfig, checkpoints: Checkpoints, state: dict[str, Any], group: Group) -> None:
    """Goes on where the last checkpoint is, if there is one, with the learning rate of the configuration."""
    settings = config.checkpoints
    step = checkpoints.load({"fingerprint": state["fingerprint"]}, other_run=settings.resume)
    if step is None:
        return
    changed = state["fingerprint"].changes(settings.allow_changes, group)
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


def _evaluate(model: nn.Module, loss_of: Callable, batches: Batches, data: Group, count: int) -> float:
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


def _make_batches(
    config: TrainConfig, datasets: Mapping[str, Dataset], seed: int, mesh: Mesh, parts: list[int] | None
) -> tuple[Batches, Callable[[], Batches] | None]:
    """Returns the batches to train with, and a function that makes those to validate with. ``parts``: as
    ``rank_shares``, where they are to be equal as far as rows divide."""
    make = partial(Batches, max_seq_length=config.max_seq_length, packed=config.pack, mesh=mesh)
    micro_batches = config.grad_accumulation_steps
    batches = make(
        datasets["train"],
        config.batch_size * micro_batches,
        seed=seed,
        micro_batches=micro_batches,
        rank_shares=parts if config.rank_shares == "equal" else config.rank_shares,
        skip_steps=config.skip_steps,
    )
    if "valid" not in datasets:
        return batches, None
    make_validation = partial(make, datasets["valid"], config.batch_size, shuffle=False, epochs=1, rank_shares=parts)
    make_validation()  # what is wrong with it, before any work
    return batches, make_validation
