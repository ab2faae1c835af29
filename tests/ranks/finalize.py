"""One rank of tests/test_finalize.py: for some seconds nothing that rank 0 sends in finalize() arrives.

Arguments: these seconds; if given, after how many the last rank is killed.
"""

import os
import signal
import sys
import threading

import numpy as np

import mlxdist
from mlxdist.native import check, lib

group = mlxdist.init()
mlxdist.all_sum(np.ones(1000, np.float32))
native = group._native


def inject(faults: bytes) -> None:
    check(lib.mlxdist_group_inject(native, faults))


group.barrier()
timers = []
if group.rank() == 0:
    inject(b"drop=1/1")
    timers.append(threading.Timer(float(sys.argv[1]), inject, [b"none"]))
if group.rank() == group.size() - 1 and len(sys.argv) > 2:
    timers.append(threading.Timer(float(sys.argv[2]), os.kill, [os.getpid(), signal.SIGKILL]))
for timer in timers:
    timer.start()
try:
    group.finalize()
finally:
    for timer in timers:
        timer.cancel()
print("finalized")
