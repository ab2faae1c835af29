"""`mlxdist bench checkpoint`: what a save costs the steps of a training."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

import mlxdist
from mlxdist.base.user_path import UserPath

from .benchmark import Benchmark
from .results import Comparison, Results, Row, Target, by_case, case_name
from .runner import ONE_THREAD, Runner
from .sizes import multiples_of
from .timing import Work
from .workload import BenchmarkWorkload

__all__ = ["CheckpointSaves", "checkpoint", "targets"]

STEPS, ASYNCHRONOUS, WAITING = "no save", "asynchronous", "waiting"
LOST = 0.05  # of the time of a step


class CheckpointSaves(BenchmarkWorkload):
    """Cases: hidden, layers, rows, steps. Parameters: directory."""

    blocks = {"calls": 1}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        directory = Path(self.parameters["directory"], str(case["hidden"]))
        with mlxdist.train.Checkpoints(directory, group=self.world) as checkpoints:
            training = Training(case, checkpoints, self.world)
            work = partial(Work, operations=case["steps"], after=checkpoints.wait)
            works = {
                STEPS: work(training.run),
                ASYNCHRONOUS: work(lambda: training.run(save=True), wrong=training.count_wrong),
                WAITING: work(lambda: training.run(save=True, wait=True)),
            }
            return self.time(case, works, more=dict.fromkeys(works, {"saved": training.nbytes}))


class Training:
    """Data-parallel training of a model of linear layers. ``nbytes``: the bytes that a save writes."""

    def __init__(self, case: dict[str, Any], checkpoints: mlxdist.train.Checkpoints, world: mlxdist.Group) -> None:
        self.checkpoints, self.world, self.steps = checkpoints, world, case["steps"]
        mx.random.seed(0)
        self.model = nn.Sequential(*(nn.Linear(case["hidden"], case["hidden"]) for _ in range(case["layers"])))
        self.optimizer = optim.AdamW(1e-4)
        self.optimizer.init(self.model.trainable_parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.x = mx.random.normal((case["rows"], case["hidden"]), key=mx.random.key(world.rank()))
        self.gradients = nn.value_and_grad(self.model, lambda x: mx.square(self.model(x)).mean())
        mx.eval(self.model.parameters(), self.optimizer.state, self.x)
        self.saves, self.last = 0, self.model.parameters()
        saved: Any = tree_flatten([self.last, self.optimizer.state])
        self.nbytes = sum(array.nbytes for _, array in saved)

    def run(self, save: bool = False, wait: bool = False) -> None:
        if save:
            self.saves += 1
            self.checkpoints.save(self.saves, self.state)
            self.last = tree_map(lambda array: array, self.model.parameters())
        if wait:
            self.checkpoints.wait()
        for _ in range(self.steps):
            _, gradients = self.gradients(self.x)
            self.optimizer.update(self.model, mlxdist.average_gradients(gradients, self.world))
            mx.eval(self.model.parameters(), self.optimizer.state)

    def count_wrong(self) -> int:
        """Loads the last checkpoint, and counts the elements that differ from the model as it was saved."""
        self.checkpoints.load({"model": self.model})
        different = tree_map(lambda one, other: (one != other).sum(), self.model.parameters(), self.last)
        counts: Any = tree_flatten(different)
        return sum(count.item() for _, count in counts)


def targets(results: Results) -> list[Target]:
    return [
        Target(
            f"{case_name(row[STEPS]['case'])}: step time lost", f"{LOST:.0%} or less", _lost(row, ASYNCHRONOUS), LOST
        )
        for row in by_case(results)
    ]


def _lost(row: Row, name: str) -> float | None:
    """The share by which the save makes a step longer."""
    saving, plain = row[name]["microseconds"], row[STEPS]["microseconds"]
    return saving["median"] / plain["median"] - 1 if saving and plain else None


@Benchmark(
    CheckpointSaves,
    show=Comparison(
        lambda results: "a step of two ranks",
        ASYNCHRONOUS,
        (STEPS, WAITING),
        {
            "MB saved": lambda row: f"{row[ASYNCHRONOUS]['saved'] / 1e6:.0f}",
            "lost": lambda row: f"{_lost(row, ASYNCHRONOUS) or 0:.1%}",
            "lost, waiting": lambda row: f"{_lost(row, WAITING) or 0:.1%}",
        },
    ),
    targets=targets,
    repeats=7,
    parameters={"variables": ONE_THREAD},
    two_ranks_here=True,
)
@click.option("--hidden", type=multiples_of(8), default="1024", show_default=True, help="Widths of the layers.")
@click.option("--layers", type=click.IntRange(1, 64), default=4, show_default=True, help="Linear layers of a model.")
@click.option("--rows", type=click.IntRange(1, 65536), default=8, show_default=True, help="Of a batch of one rank.")
@click.option("--steps", type=click.IntRange(1, 10000), default=20, show_default=True, help="For each save.")
@click.option("--directory", type=UserPath(file_okay=False), help="Where to save.  [default: a temporary one]")
def checkpoint(runner: Runner, hidden: list[int], layers: int, rows: int, steps: int, directory: str | None) -> Results:
    """Time data-parallel steps of two ranks of this machine, with AdamW in float32, without a save and with one.

    "asynchronous": a save before the first step is written while the steps go on; "waiting": the steps wait for it.
    Both make one checkpoint of model and optimizer for --steps steps, and all times are of one step. The last
    checkpoint is loaded and compared. With --pin, a rank's thread that writes shares the core with its steps.

    The exit status is 1 if an element was wrong, or the file is not written.
    """
    cases = [{"operation": "step", "hidden": size, "layers": layers, "rows": rows, "steps": steps} for size in hidden]
    with tempfile.TemporaryDirectory(prefix="mlxdist-bench-", dir=directory) as path:
        return runner.run(cases, directory=path)
