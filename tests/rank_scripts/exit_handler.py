"""One rank of test_group.py: communicates in an exit handler of its own."""

import atexit

import mlx.core as mx

import mlxdist

group = mlxdist.init()
atexit.register(lambda: print("sum at exit:", mlxdist.all_sum(mx.array(1.0)).item()))
