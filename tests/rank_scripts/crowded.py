"""One rank of test_algorithms.py: bound to cores, and what it chooses then.

Arguments: the cores of rank 0, of rank 1 ...: "0,1 0,1 0,1".
"""

import os
import sys

import numpy as np

import mlxdist

os.sched_setaffinity(0, map(int, sys.argv[1 + int(os.environ["MLXDIST_RANK"])].split(",")))
group = mlxdist.init()
x = np.ones(2048, np.float32)
for _ in range(200):
    assert mlxdist.all_sum(x)[-1] == group.size()
print(group.algorithm("all_sum", x.nbytes))
