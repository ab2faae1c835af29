"""Ranks that end in several ways. argv: how rank 1 ends."""

import os
import signal
import sys
import threading

import numpy as np

import mlxdist

how = sys.argv[1]
group = mlxdist.init()
ones = np.ones(300001, dtype=np.float32)
assert (mlxdist.all_sum(ones) == group.size()).all()
print("summed", flush=True)

if group.rank() == 1:
    if how in ("SIGTERM", "SIGINT", "SIGKILL"):
        threading.Timer(0.3, os.kill, (os.getpid(), getattr(signal, how))).start()
    if how == "exception":
        raise ValueError("on purpose")
    if how == "_exit":
        os._exit(3)
if how != "returns":
    mlxdist.recv_like(ones, 0 if group.rank() == 1 else 1)  # which no rank sends
