"""What it costs when ranks meet before each operation, as they do for 256 operations after `mlxdist.meet()` on GPUs.

    MLXDIST_MEET_AFTER=2 mlxdist launch -n 2 -- python benchmarks/meetings.py

With and without meetings, alternately: a training step of the demo's model, and eight sums of 4 KiB in a chain, as in
one token of a small model. Prints medians and ranges.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import qwen3

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_and_generate as demo  # noqa: E402

MEETING_OPERATIONS = 256  # of native/engine/meeting.h
REPEATS = 9


def training_step() -> Callable[[], None]:
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


def measure(step: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds and messages of meetings, per step."""
    group = mlxdist.init()
    before, begin = group.stats()["meeting_messages"], time.perf_counter()
    for _ in range(repeats):
        step()
    seconds = (time.perf_counter() - begin) / repeats
    return seconds, (group.stats()["meeting_messages"] - before) / repeats


def compare(name: str, step: Callable[[], None], repeats: int) -> None:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    messages: dict[bool, float] = {}
    step()
    for _ in range(REPEATS):
        for meets in (True, False):
            mlxdist.meet()
            for _ in range(0 if meets else MEETING_OPERATIONS):
                mlxdist.barrier()
            took, messages[meets] = measure(step, repeats)
            seconds[meets].append(took)
    with_, without = (statistics.median(seconds[meets]) for meets in (True, False))
    if mlxdist.get_rank() == 0:
        for meets, median in ((True, with_), (False, without)):
            low, high = min(seconds[meets]), max(seconds[meets])
            words = f"{'with' if meets else 'without'} meetings"
            print(
                f"{name:14} {words:17} {median * 1e6:9.1f} us ({low * 1e6:.1f} to {high * 1e6:.1f})"
                f"  {messages[meets]:4.1f} messages of rank 0"
            )
        print(f"{name:14} {(with_ - without) / without:+.1%}")


if __name__ == "__main__":
    compare("training step", training_step(), 8)
    compare("8 sums", sums, 30)
