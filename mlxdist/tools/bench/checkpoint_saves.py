"""What the ranks of `mlxdist bench checkpoint` measure: steps without a save, with one, and waiting for one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

import mlxdist
from mlxdist.train import Checkpoints, average_gradients

from .rank import time_case
from .timing import Work, interleave

__all__ = ["CheckpointSaves"]


class CheckpointSaves:
    """Cases: hidden, layers, rows, steps. Parameters: directory, repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.directory = world, Path(parameters["directory"])
        self.take = partial(interleave, repeats=parameters["repeats"], calls=1)

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        with Checkpoints(self.directory / str(case["hidden"]), group=self.world) as checkpoints:
            training = Training(case, checkpoints, self.world)
            work = partial(Work, operations=case["steps"], after=checkpoints.wait)
            works = {
                "no save": work(training.run),
                "asynchronous": work(lambda: training.run(save=True), wrong=training.count_wrong),
                "waiting": work(lambda: training.run(save=True, wait=True)),
            }
            results = time_case(self.world, case, works, self.take)
        return [result | {"saved": training.nbytes} for result in results]


class Training:
    """A model of linear layers, data-parallel. ``nbytes``: of all that is saved."""

    def __init__(self, case: dict[str, Any], checkpoints: Checkpoints, world: mlxdist.Group) -> None:
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
            self.optimizer.update(self.model, average_gradients(gradients, self.world))
            mx.eval(self.model.parameters(), self.optimizer.state)

    def count_wrong(self) -> int:
        """Elements of the model that the last checkpoint does not have as they were when it was saved."""
        self.checkpoints.load({"model": self.model})
        different = tree_map(lambda one, other: (one != other).sum(), self.model.parameters(), self.last)
        counts: Any = tree_flatten(different)
        return sum(count.item() for _, count in counts)
