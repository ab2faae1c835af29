"""What the ranks of `mlxdist bench dp` measure: steps of training, in the same processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import mlxdist
from mlxdist import train

from .operations import count_off
from .rank import time_case
from .timing import CORES, Work, interleave

TOLERANCE = 1e-5  # of the largest element: the same sums, in float32


class GradientOverlap:
    """Cases: operation "step", layers, dims, rows, bucket. Parameters: repeats, pinned."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world = world
        self.take = partial(interleave, repeats=parameters["repeats"], warm_up=2, calls=1)
        cores = CORES
        if parameters["pinned"] and hasattr(os, "sched_setaffinity"):
            # The runner keeps a rank on one core, its communication, too. Threads that begin later have these.
            cores = CORES[world.rank() % len(CORES) :: world.size()]
            os.sched_setaffinity(0, cores)
            fewest = len(cores)
        else:
            fewest = len(CORES) // world.size()
        self.free = int(mlxdist.all_min(np.array([max(0, fewest - 1)]), group=world)[0])

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        mx.random.seed(0)
        dims = case["dims"]
        model = nn.Sequential(*(nn.Linear(dims, dims, bias=False) for _ in range(case["layers"])))
        x = mx.random.normal((case["rows"], dims), key=mx.random.key(self.world.rank()))
        mx.eval(model.parameters(), x)

        def loss(x: mx.array) -> mx.array:
            return mx.square(model(x)).mean()

        alone = nn.value_and_grad(model, loss)
        overlapped = train.value_and_grad(model, loss, group=self.world, all_reduce_size=case["bucket"])
        average = partial(mlxdist.average_gradients, group=self.world, all_reduce_size=case["bucket"])

        def after() -> Any:
            found = alone(x)[1]
            mx.eval(found)
            return average(found)

        calls: dict[str, Callable[[], Any]] = {
            "overlapped": lambda: overlapped(x)[1],
            "after": after,
            "alone": lambda: alone(x)[1],
        }
        expected, got = (dict(tree_flatten(calls[name]())) for name in ("after", "overlapped"))
        wrong = sum(count_off(array, TOLERANCE, got[path]) for path, array in expected.items())
        nbytes = sum(array.nbytes for array in expected.values())
        del expected, got
        works = {name: Work(partial(_evaluate, call), wrong=lambda: wrong, copies=1) for name, call in calls.items()}
        results = time_case(self.world, case, works, self.take, copied=nbytes)
        return [result | {"free_cores": self.free, "gradient_bytes": nbytes} for result in results]


def _evaluate(call: Callable[[], Any]) -> None:
    mx.eval(call())
