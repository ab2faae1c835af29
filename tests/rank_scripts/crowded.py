"""One rank of test_algorithms.py: bound to cores, what it chooses, and how often it polls in an operation.

Arguments: the cores of rank 0, of rank 1 ...: "0,1 0,1 0,1".
"""

import os
import sys

import numpy as np

import mlxdist

OPERATIONS = 200

os.sched_setaffinity(0, map(int, sys.argv[1 + int(os.environ["MLXDIST_RANK"])].split(",")))
group = mlxdist.init()
x = np.ones(2048, np.float32)
mlxdist.all_sum(x)
before = group.stats()["poll_cq_calls"]
for _ in range(OPERATIONS):
    assert mlxdist.all_sum(x)[-1] == group.size()
polls = (group.stats()["poll_cq_calls"] - before) / OPERATIONS
print(group.algorithm("all_sum", x.nbytes), polls)
