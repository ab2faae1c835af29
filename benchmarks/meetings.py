"""What it costs when ranks meet before each operation, as they do for 256 operations after `mlxdist.meet()` on GPUs.

    python benchmarks/meetings.py

With and without meetings, alternately: a training step of the demo's model, and eight sums of 4 KiB in a chain, as in
one token of a small model. Needs mlx-lm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.tools.bench.rank import time_case
from mlxdist.tools.bench.results import comparison_table
from mlxdist.tools.bench.runner import Report, Runner, benchmark
from mlxdist.tools.bench.timing import Work, interleave

MEETING_OPERATIONS = 256  # of native/engine/meeting.h
MEETS, DOES_NOT = "with meetings", "without meetings"


class Meetings:
    """Cases: operation. Parameters: repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.take = world, partial(interleave, repeats=parameters["repeats"], calls=1)
        self.steps = {"training step": training_step(), "8 sums": sums}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        step, messages = self.steps[case["operation"]], {}
        for name in (MEETS, DOES_NOT):
            self._begin(name)
            before = self.world.stats()["meeting_messages"]
            step()
            messages[name] = self.world.stats()["meeting_messages"] - before
        works = {name: Work(step, before=partial(self._begin, name)) for name in messages}
        results = time_case(self.world, case, works, self.take)
        return [result | {"messages": messages[result["variant"]]} for result in results]

    def _begin(self, name: str) -> None:
        mlxdist.meet()
        for _ in range(MEETING_OPERATIONS if name == DOES_NOT else 0):
            self.world.barrier()


def training_step() -> Callable[[], None]:
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.models import qwen3

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import train_and_generate as demo

    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(demo.MODEL))
    optimizer = optim.AdamW(1e-4)
    loss_and_gradients = nn.value_and_grad(model, demo.loss_of)
    corpus = np.arange(10 * demo.SEQUENCE) % demo.MODEL["vocab_size"]
    rows = next(demo.batches(corpus, 1, 0))

    def step() -> None:
        loss, gradients = loss_and_gradients(model, rows)
        optimizer.update(model, mlxdist.all_reduce_grads(gradients))
        mx.eval(mlxdist.all_sum(loss), model.parameters(), optimizer.state)

    return step


def sums() -> None:
    y = mx.ones(1024)
    for _ in range(8):
        y = mlxdist.all_sum(y) / 2
    mx.eval(y)


@benchmark(repeats=30, two_ranks_here=True)
def meetings(runner: Runner) -> Report:
    """Time steps with and without meetings on two ranks of this machine."""
    cases = [{"operation": "training step"}, {"operation": "8 sums"}]
    results = runner.run(f"{__file__}:Meetings", cases, variables={"MLXDIST_MEET_AFTER": "2"})
    sent = {f"messages {name}": lambda row, name=name: str(row[name]["messages"]) for name in (DOES_NOT, MEETS)}
    return Report(results, lambda found, console: console.print(comparison_table(found, "", console, more=sent)))


if __name__ == "__main__":
    meetings()
