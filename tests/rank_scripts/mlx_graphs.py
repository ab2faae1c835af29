"""One rank of test_bridge.py: lazy graphs, mx.compile, vmap, async_eval, streams and threads."""

import threading

import mlx.core as mx
import numpy as np

import mlxdist

group = mlxdist.init()
rank, size, world = group.rank(), group.size(), group.mlx
ranks_sum = sum(range(1, size + 1))


def require(result: mx.array, expected: object, what: str) -> None:
    assert np.array_equal(np.array(result), np.broadcast_to(np.array(expected), result.shape)), f"{what}: {result}"


def chain() -> None:
    """50 operations in one graph, most of them in place: MLX reuses a buffer without other readers."""
    x = mx.full((1000,), float(rank + 1))
    before = group.stats()["collectives"]
    y, expected = x, [r + 1.0 for r in range(size)]
    for _ in range(25):
        y = mx.distributed.all_sum(y, group=world) / size
        y = mx.distributed.all_max(y + rank, group=world) + rank
        mean = sum(expected) / size
        expected = [mean + size - 1 + r for r in range(size)]
    assert group.stats()["collectives"] == before, "building a graph has communicated"
    mx.eval(y)
    assert group.stats()["collectives"] - before == (50 if size > 1 else 0)
    require(y, expected[rank], "chain")
    require(x, rank + 1, "the chain's input")


def independent() -> None:
    """Operations that do not depend on each other are evaluated in one order on all ranks."""
    inputs = [mx.full((n,), float(rank + n)) for n in range(1, 30)]
    sums = [mx.distributed.all_sum(x, group=world) for x in inputs]
    gathered = [mx.distributed.all_gather(x, group=world) for x in inputs]
    mx.eval(sums, gathered)
    for n, (total, parts) in enumerate(zip(sums, gathered), start=1):
        require(total, sum(r + n for r in range(size)), f"sum of {n}")
        require(parts, np.repeat([r + n for r in range(size)], n), f"gather of {n}")


def with_roots() -> None:
    """Results of other shapes on other ranks do not change the order in which the rest is evaluated."""
    inputs = [mx.full((n, 2), float(rank + n)) for n in range(1, 13)]
    reduced = [mlxdist.reduce(x * 1, root=n % size) for n, x in enumerate(inputs)]
    gathered = [mlxdist.gather(x, n % size) for n, x in enumerate(inputs)]
    spread = [mlxdist.broadcast(mlxdist.all_sum(x).sum(axis=0) + y.size, 0) for x, y in zip(inputs, reduced)]
    totals = [mlxdist.all_sum(x.sum()) for x in (*reduced, *gathered)]  # of what the root alone has
    mx.eval(spread, totals, reduced, gathered)
    for n, x in enumerate(inputs, start=1):
        total = sum(r + n for r in range(size))
        require(reduced[n - 1], total, f"reduce of {n}")
        assert reduced[n - 1].shape == (x.shape if rank == (n - 1) % size else (0, 2))
        require(totals[n - 1], total * 2 * n, f"sum of what was reduced of {n}")
        require(totals[12 + n - 1], total * 2 * n, f"sum of what was gathered of {n}")
        require(spread[n - 1], total * n + (2 * n if (n - 1) % size == 0 else 0), f"broadcast of {n}")


def compiled() -> None:
    @mx.compile
    def function(x):
        y = mx.distributed.all_sum(x * 2, group=world)
        return mlxdist.broadcast(y + rank, size - 1) + mlxdist.all_reduce(x, "prod")

    # MLX's own operations cannot be compiled without shapes; ours can.
    shapeless = mx.compile(
        lambda x: mlxdist.broadcast(x + rank, size - 1) * mlxdist.all_reduce(x, "prod"), shapeless=True
    )
    swapped = mx.compile(lambda x: mlxdist.all_to_all(mlxdist.all_to_all(x) * 2), shapeless=True)
    parts = mx.compile(lambda x: mlxdist.sum_scatter(x) + mlxdist.scatter(x, 0), shapeless=True)
    product = np.prod(np.arange(1.0, size + 1))
    for n in (3, 5, 3):
        x = mx.full((n,), float(rank + 1))
        require(function(x), 2 * ranks_sum + size - 1 + product, "compiled")
        require(shapeless(x), (2 * size - 1) * product, "compiled without shapes")
        wide = mx.full((n * size, 2), float(rank + 1))
        require(swapped(wide), 2 * (rank + 1), "all_to_all without shapes")
        result = parts(wide)
        require(result, ranks_sum + 1, "parts without shapes")
        assert result.shape == ((n, 2) if size > 1 else wide.shape)
    # Two calls on equal inputs are two operations: compile must not merge them.
    before = group.stats()["collectives"]
    twice = mx.compile(lambda x: mlxdist.broadcast(x) + mlxdist.broadcast(x))
    mx.eval(twice(mx.ones((3,))))
    assert group.stats()["collectives"] - before == (2 if size > 1 else 0)


def mapped() -> None:
    x = mx.arange(12.0).reshape(3, 4) + rank
    expected = sum(np.arange(12.0).reshape(3, 4) + r for r in range(size))
    require(mx.vmap(lambda row: mx.distributed.all_sum(row, group=world))(x), expected, "vmap of all_sum")
    last = np.arange(12.0).reshape(3, 4) + size - 1
    require(mx.vmap(lambda row: mlxdist.broadcast(row, size - 1))(x), last, "vmap of broadcast")
    require(mx.vmap(lambda column: mlxdist.broadcast(column, size - 1), in_axes=1, out_axes=1)(x), last, "vmap, axis 1")


def asynchronous() -> None:
    """async_eval returns before the slower ranks have come, and the result is there afterwards."""
    x = mlxdist.all_sum(mx.full((10,), float(rank + 1)))
    mx.async_eval(x)
    y = mlxdist.all_sum(x)
    mx.async_eval(y)
    require(x, ranks_sum, "async_eval")
    require(y, ranks_sum * size, "async_eval of what depends on it")


def other_threads() -> None:
    """A second Python thread has a CPU stream of its own; the ranks take turns, so the order is the same on all."""
    results = []
    thread = threading.Thread(target=lambda: results.append(np.array(mlxdist.all_sum(mx.full((10,), float(rank + 1))))))
    thread.start()
    thread.join()
    require(mx.array(results[0]), ranks_sum, "in a thread")
    stream = mx.new_stream(mx.cpu)
    require(
        mx.distributed.all_sum(mx.full((10,), float(rank + 1)), group=world, stream=stream), ranks_sum, "in a stream"
    )
    require(mlxdist.broadcast(mx.full((10,), float(rank)), size - 1, stream=stream), size - 1, "broadcast in a stream")


def mixed_with_numpy() -> None:
    x = mx.full((10,), float(rank + 1))
    for _ in range(10):
        lazy = mlxdist.all_sum(x)
        mx.eval(lazy)
        eager = mlxdist.all_sum(np.array(x))
        assert np.array_equal(np.array(lazy), eager)


chain()
independent()
with_roots()
compiled()
mapped()
asynchronous()
other_threads()
mixed_with_numpy()
print("exact")
