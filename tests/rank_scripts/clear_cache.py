"""One rank of test_bridge.py: mx.clear_cache() holds the interpreter's lock while it waits for MLX's threads."""

import mlx.core as mx

import mlxdist

mlxdist.init()
for _ in range(300):
    mx.async_eval(mlxdist.all_max(mx.ones(1000)) * 2, mlxdist.all_gather(mx.ones(10)))
    mx.clear_cache()
print("done")
