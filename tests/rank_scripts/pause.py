"""Operations, a pause, and operations again. argv: seconds."""

import sys
import time

import numpy as np

import mlxdist

group = mlxdist.init()
ones = np.ones(300001, dtype=np.float32)
for seconds in (0, float(sys.argv[1])):
    time.sleep(seconds)
    assert (mlxdist.all_sum(ones) == group.size()).all() and (mlxdist.all_sum(ones[:5]) == group.size()).all()
stats = group.stats()
print(f"{stats['reconnections']} re-created, {stats['provider_dropped_by_fault']} lost")
