"""One rank of test_finalize.py: for some seconds nothing that rank 0 sends in finalize() arrives.

Arguments: these seconds; if given, after how many the last rank is killed.
"""

import os
import signal
import sys
import threading

import numpy as np

import mlxdist
from mlxdist.runtime.group.group import engine_of

group = mlxdist.init()
inject = engine_of(group).world.native_group.inject_faults
mlxdist.all_sum(np.ones(1000, np.float32))
group.barrier()
timers = []
if group.rank() == 0:
    inject("drop=1/1")
    timers.append(threading.Timer(float(sys.argv[1]), inject, ["none"]))
if group.rank() == group.size() - 1 and len(sys.argv) > 2:
    timers.append(threading.Timer(float(sys.argv[2]), os.kill, [os.getpid(), signal.SIGKILL]))
for timer in timers:
    timer.start()
try:
    mlxdist.finalize()
finally:
    for timer in timers:
        timer.cancel()
print("finalized")
