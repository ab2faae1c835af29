"""One rank of test_debug.py: a few operations; with the argument "loses" one of its messages is lost."""

import sys

import numpy as np

import mlxdist
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, lib

group = mlxdist.init()
mlxdist.all_sum(np.ones(3, np.float32))
if "loses" in sys.argv and group.rank() == 0:
    check(lib.mlxdist_group_inject_faults(engine_of(group).native, b"drop_next=1"))
mlxdist.all_sum(np.ones(3, np.float32))
