"""One rank of test_algorithms.py: the last rank uses another algorithm. Prints the error of each rank.

Arguments: an operation, the algorithm of the last rank, that of all others.
"""

import os
import sys

import numpy as np

name, odd, even = sys.argv[1:]
last = os.environ["MLXDIST_RANK"] == str(int(os.environ["MLXDIST_WORLD_SIZE"]) - 1)
os.environ["MLXDIST_ALGO"] = odd if last else even

import mlxdist

group = mlxdist.init()
try:
    getattr(mlxdist, name)(np.ones(6000))
    group.barrier()  # a rank that had all its data gets the error of the others here
except mlxdist.Error as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(1)
print("no error")
