"""One rank of test_checkpoint_kills.py: trains until one of the ranks is killed.

Arguments: a directory; whether the ranks share it; the rank that is killed, in the resume, the step or the save, in the
how-manieth one, and how many seconds after that begins.
"""

import os
import signal
import sys
import threading
import zlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import mlxdist
from mlxdist import train

directory, shared, victim, phase, number, delay = sys.argv[1:]
group = mlxdist.init()
left = int(number)


def enter(name: str) -> None:
    global left
    if (group.rank(), name) == (int(victim), phase):
        left -= 1
        if left == 0:
            threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()


def digest(tree: object) -> int:
    return zlib.crc32(b"".join(np.array(array).tobytes() for _, array in sorted(tree_flatten(tree))))


mx.random.seed(0)
model, optimizer = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64)), optim.AdamW(1e-3)
loss = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())
own = {"rank": group.rank()}
checkpoints = train.Checkpoints(Path(directory) if shared == "shared" else Path(directory, f"host-{group.rank()}"))
state = {"model": model, "optimizer": optimizer}
enter("resume")
step = checkpoints.load(state, own=own, other_run=True) or 0
assert own == {"rank": group.rank()}
print("resumed", step, digest([model.parameters(), optimizer.state]) if step else 0, flush=True)
while True:
    step += 1
    enter("step")
    _, gradients = loss(mx.random.normal((8, 256), key=mx.random.key(2 * step + group.rank())))
    optimizer.update(model, train.average_gradients(gradients))
    mx.eval(model.parameters(), optimizer.state)
    print("did", step, digest([model.parameters(), optimizer.state]), flush=True)
    if step % 3 == 0:
        enter("save")
        checkpoints.save(step, state, own=own)
