"""Steps of training: parameters cut over ranks (fsdp), and layers cut over ranks (tp), as one process has them."""

import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from common import group, rank, report, size
from mlx.utils import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import tiny_models

import mlxdist
from mlxdist.nn import plan_shards, shard_model
from mlxdist.train import fully_shard, value_and_grad

STEPS = 4
TOKENS = mx.random.randint(0, 50, (STEPS, 2 * size, 16), key=mx.random.key(1))


def loss(model: nn.Module, tokens: mx.array) -> mx.array:
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def trained(model: nn.Module, mine: bool, make_step: object) -> tuple[list[float], float]:
    """The loss of each step, and seconds of the last one."""
    optimizer, step, found, took = optim.AdamW(1e-3, eps=1e-4), make_step(model, loss), [], 0.0
    for batch in TOKENS:
        begin = time.perf_counter()
        value, gradients = step(model, batch[2 * rank : 2 * rank + 2] if mine else batch)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, value)
        took = time.perf_counter() - begin
        found.append(float((mlxdist.all_sum(value) / size).item() if mine else value.item()))
    assert all(mx.isfinite(array).all().item() for _, array in tree_flatten(model.parameters()))
    return found, took


def near(found: list[float], wanted: list[float], what: str) -> None:
    worst = max(abs(a - b) for a, b in zip(found, wanted))
    assert worst < 1e-4, f"{what} on rank {rank}: {found}, not {wanted}"


wanted, alone = trained(tiny_models.build("qwen3"), False, nn.value_and_grad)
fsdp = tiny_models.build("qwen3")
fully_shard(fsdp)
found, seconds = trained(fsdp, True, value_and_grad)
near(found, wanted, "fsdp")
tp = tiny_models.build("qwen3")
shard_model(tp, plan_shards(tp, tp=size), group=group)
found_tp, seconds_tp = trained(tp, False, nn.value_and_grad)
near(found_tp, wanted, "tp")
milliseconds = {"one process": alone, "fsdp": seconds, "tp": seconds_tp}
report(**{f"{name}, ms a step": round(value * 1e3, 2) for name, value in milliseconds.items()}, losses=wanted)
