"""`mlxdist train`: prepares a training, and runs its loop, again where ranks are lost or join."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.environment import Environment
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.default_group import alone, init
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.mesh import mesh as make_mesh

from .checkpoint.ranks import gather
from .config import TrainConfig
from .control import Control
from .datasets import load_dataset
from .elastic import InMemoryCheckpoint, elastic
from .fingerprint import Fingerprint
from .model import make_model, open_tokenizer
from .preflight import RowCounts, check_elastic, check_folders, check_settings, check_tokens, count_rows, show
from .report import Report
from .router_balance import RouterBalance
from .rows import Dataset
from .seeds import Seeds
from .training_loop import Prepared, TrainingLoop

__all__ = ["TrainResult", "train"]


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

    All ranks of the job call it, in their main thread, also a single one. Rank 0 prints what the command prints. In a
    job of ``mlxdist launch --elastic`` it goes on when ranks are lost or join, as :func:`elastic` does.

    Args:
        config: of the training, the same on all ranks but for paths; or a mapping as the command's TOML file is one.
        check: do what comes before the first step, which finds what is wrong, and print what is known then: memory,
            parameters, steps, tokens. Nothing is trained or written.

    Raises:
        InvalidArgument: the configuration is wrong, or does not fit the ranks, the model or the data. On all ranks,
            before any work.
        Mismatch: the ranks have different meshes, parameters or steps. On all ranks.
    """
    environment = Environment.read()
    is_elastic = environment.membership is not None
    is_late = bool(environment.join or environment.epoch)  # the others have done this at the start
    with agreed("train", alone() if is_late else init()):
        config = config if isinstance(config, TrainConfig) else TrainConfig.from_mapping(config)
        if is_elastic:
            check_elastic(config)
    training = _Training(config, check)
    try:
        if not is_elastic:
            return training.run(None)
        if environment.join:  # later; the others train meanwhile
            training.prepare(make_mesh(group=alone()))
        return elastic(training.run, grow_every=config.elastic.grow_every, trainable_only=True)
    finally:
        training.close()


class _Training:
    """The training as this process has it, whatever its group is."""

    def __init__(self, config: TrainConfig, check: bool) -> None:
        self._config, self._check = config, check
        self._prepared: Prepared | None = None
        self._control: Control | None = None
        self._members: list[int] = []  # the ranks of the last group, by their numbers at the start of the job
        self._begun = 0  # the last step that has begun here

    def prepare(self, mesh: Mesh) -> tuple[Prepared, Seeds]:
        """Checks what it can, and makes what is made once. All ranks of the mesh call it."""
        config = self._config
        with agreed("train", mesh.group):
            check_settings(config)
            check_folders(config)
        fingerprint = Fingerprint(config, mesh.group)
        tokenizer = open_tokenizer(config, mesh.group)
        seeds = Seeds(config.seed, mesh=mesh)
        datasets, counts = _load_datasets(config, tokenizer, mesh)
        model, flops = make_model(config, seeds.seed, mesh)
        check_tokens(counts, model, tokenizer, config, mesh)
        routers = RouterBalance(model) if config.router_aux_loss_coef else None
        self._prepared = Prepared(fingerprint, datasets, counts, model, flops, routers)
        return self._prepared, seeds

    def run(self, memory: InMemoryCheckpoint | None) -> TrainResult:
        """Trains with the ranks that there are, in a job whose ranks may be lost and join from what is in memory."""
        config = self._config
        mesh = make_mesh(**dataclasses.asdict(config.mesh))
        prepared, seeds = self._prepared_for(mesh, memory)
        loop = TrainingLoop(config, prepared, mesh, seeds, memory)
        with loop.checkpoints as checkpoints:
            loop.restore()
            if not self._check or all(gather(Path(config.checkpoints.directory).is_dir(), mesh.group)):
                checkpoints.lock(loop.batches.step)
            if self._check:
                show(config, prepared.counts, prepared.model, loop.optimizer, mesh)
                return TrainResult(loop.batches.step)
            self._control = control = loop.make_control(self._control)
            with Report(config, loop.batches.step, mesh.group) as report:
                if memory is not None:
                    self._report_ranks(report, loop.batches.step, mesh)
                try:
                    output = loop.run(control, report)
                finally:
                    self._begun = loop.batches.step
        loss = math.nan if loop.loss is None else loop.loss
        return TrainResult(loop.batches.step, loss, loop.validation_loss, output)

    def close(self) -> None:
        """Gives the signals back."""
        if self._control is not None:
            self._control.close()

    def _prepared_for(self, mesh: Mesh, memory: InMemoryCheckpoint | None) -> tuple[Prepared, Seeds]:
        """What is made once, and seeds of this mesh. What there is counts on all ranks, or on none; and only where a
        rank has a state for it, without which the model may have begun a step that is lost."""
        if memory is None:
            return self.prepare(mesh)
        found = gather([self._prepared is not None, memory.step is not None], mesh.group)
        if self._prepared is None or not all(has for has, _ in found) or not any(has for _, has in found):
            return self.prepare(mesh)
        return self._prepared, Seeds(self._config.seed, mesh=mesh)

    def _report_ranks(self, report: Report, step: int, mesh: Mesh) -> None:
        """Reports which ranks were lost or have joined, if rank 0 knows those of before."""
        before = self._members
        found = gather([Environment.read().first_rank, self._begun], mesh.group)
        self._members = [member for member, _ in found]
        lost, joined = sorted({*before} - {*self._members}), sorted({*self._members} - {*before})
        if before and (lost or joined):
            steps = range(step, max(begun for _, begun in found))
            repeated = len(set(steps) - set(self._config.skip_steps))
            report.ranks_changed(step, lost, joined, mesh.group.size(), repeated)


def _load_datasets(config: TrainConfig, tokenizer: Any, mesh: Mesh) -> tuple[dict[str, Dataset], dict[str, RowCounts]]:
    """The data to train and to validate with, and the counts of their rows, by split."""
    datasets, counts = {}, {}
    for split in ["train"] if config.val_batches == 0 or not Path(config.data).is_dir() else ["train", "valid"]:
        dataset = load_dataset(config.data, tokenizer, split, mask_prompt=config.mask_prompt, group=mesh.group)
        datasets[split], counts[split] = dataset, count_rows(split, dataset, tokenizer, config, mesh)
    return datasets, counts
