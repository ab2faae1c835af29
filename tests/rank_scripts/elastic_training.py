"""Trains a small model, elastically: ``elastic_training.py FILE STEPS [SEED]`` saves its weights to FILE.

With SEED, ranks are killed at random moments: half of the first ones, and a fifth of those that take their places.
Where all are lost at once, the job starts again, and none is killed any more.
"""

import os
import random
import signal
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import mlxdist
from mlxdist import train

file, steps = sys.argv[1], int(sys.argv[2])
choice = random.Random(f"{sys.argv[3:]} {os.environ.get('MLXDIST_RANK')} {'MLXDIST_JOIN' in os.environ}")
likely = 0.2 if "MLXDIST_JOIN" in os.environ else 0.5
is_doomed = len(sys.argv) > 3 and os.environ.get("MLXDIST_RESTART_COUNT") == "0" and choice.random() < likely
# Soon after this step: in it or the next ones, or while the group shrinks or grows.
last = choice.randrange(5, steps - 100) if is_doomed else steps
delay = choice.uniform(0, 0.1)
timers = []

mx.random.seed(3)
model = nn.Sequential(nn.Embedding(32, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 32))
optimizer = optim.AdamW(1e-2)
samples = np.random.default_rng(5).integers(0, 32, (96, 17))
dataset = [(row.tolist(), 0) for row in samples]


def loss_of(model, batch, lengths):
    losses = nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:])
    return losses.mean(), mx.array(losses.size)


def training(checkpoint):
    batches = train.Batches(dataset, 24, 17, packed=True, seed=1)
    loss_and_gradients = train.value_and_grad(model, loss_of)
    state = {"model": model, "optimizer": optimizer, "batches": batches, "seen": 0}
    checkpoint.load(state)
    while batches.step < steps:
        if is_doomed and batches.step >= last and not timers:
            timers.append(threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            timers[0].start()
        batch, lengths = next(batches)
        (loss, _), gradients = loss_and_gradients(model, batch, lengths)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        state["seen"] += 24
        checkpoint.save(batches.step, state)
    assert state["seen"] == 24 * steps == batches.position
    return loss.item()


loss = train.elastic(training, grow_every=5)
group = mlxdist.init()
mlxdist.barrier()  # before one of them ends and is no more there for the others
if group.rank() == 0:
    mx.savez(file, **dict(tree_flatten(model.parameters())))
print("loss", loss, flush=True)
