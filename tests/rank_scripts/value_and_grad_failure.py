"""One rank of test_value_and_grad_failure.py: after one good step, the last rank's loss raises."""

import sys

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlxdist
from mlxdist import train

micro_batches = int(sys.argv[1])
failing_call = int(sys.argv[2])  # of the function, counted from 1
group = mlxdist.init()
last = group.rank() == group.size() - 1
mx.random.seed(0)
model, calls = nn.Linear(5, 5), 0


def loss(x: mx.array) -> mx.array:
    global calls
    calls += 1
    if last and calls == failing_call:
        raise ValueError("no such token")
    return model(x).square().mean()


step = train.value_and_grad(model, loss, micro_batches=micro_batches)
x = mx.ones((4, 5))
for _ in range((failing_call - 1) // micro_batches):
    mx.eval(step(x))
with pytest.raises(ValueError if last else mlxdist.Aborted, match="no such token") as raised:
    mx.eval(step(x))
assert last or "value_and_grad: ValueError" in str(raised.value)
print("done", flush=True)
sys.exit(1)  # as the program that does not catch it
