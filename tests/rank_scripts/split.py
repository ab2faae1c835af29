"""One rank of test_split.py. Argument: the scenario."""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist


def members(part: mlxdist.Group) -> list[int]:
    """The ranks of the world that are in a group, in its order, as both kinds of operations see it."""
    eager = mlxdist.all_gather(np.array([rank]), group=part).tolist()
    lazy = mx.distributed.all_gather(mx.array([rank]), group=part.mlx).tolist()
    assert eager == lazy and eager[part.rank()] == rank and len(eager) == part.size(), (eager, lazy, part)
    assert (part.mlx.rank(), part.mlx.size()) == (part.rank(), part.size())
    part.barrier()
    return eager


def grid() -> None:
    """2 x 2, tensor parallel by data parallel, with keys that reverse the order of the ranks."""
    for key, turn in ((-1, 1), (rank, 1), (size - rank, -1)):
        tensor = group.split(rank // 2, key)
        data = group.split(rank % 2, key)
        row, column = [2 * (rank // 2), 2 * (rank // 2) + 1], [rank % 2, rank % 2 + 2]
        assert members(tensor) == row[::turn] and members(data) == column[::turn]
        # All of them in one graph: partial sums over a row, then the average over a column.
        x = mx.full((300, 100), float(rank))
        y = mlxdist.all_sum(x, group=tensor)
        z = mlxdist.all_sum(y, group=data) / 2
        w = mx.distributed.all_max(z * (rank + 1), group=group.mlx)
        assert np.array_equal(np.array(y), np.full((300, 100), sum(row)))
        assert np.array_equal(np.array(w), np.full((300, 100), 12.0))
        # Every operation of ours that has a root, or an order.
        own = mx.arange(4.0) + 10 * rank
        first = mlxdist.broadcast(own, 0, group=tensor)
        assert first.tolist() == [v + 10 * row[::turn][0] for v in range(4)]
        exchanged = mlxdist.all_to_all(own, group=data).tolist()
        mine = slice(2 * data.rank(), 2 * data.rank() + 2)
        assert exchanged == [v + 10 * r for r in column[::turn] for v in range(4)[mine]]
        part = mlxdist.sum_scatter(np.array(own), group=tensor)
        assert part.tolist() == [2 * v + 10 * sum(row) for v in range(4)[2 * tensor.rank() : 2 * tensor.rank() + 2]]


def grid_of_mlx() -> None:
    """The same through mx.distributed."""
    world = group.mlx
    for key, turn in ((-1, 1), (size - rank, -1)):
        tensor, data = world.split(rank // 2, key), world.split(rank % 2, key)
        row, column = [2 * (rank // 2), 2 * (rank // 2) + 1][::turn], [rank % 2, rank % 2 + 2][::turn]
        assert mx.distributed.all_gather(mx.array([rank]), group=tensor).tolist() == row
        assert mx.distributed.all_gather(mx.array([rank]), group=data).tolist() == column
        assert tensor.rank() == row.index(rank) and tensor.size() == 2
        alone = tensor.split(tensor.rank())
        assert (alone.rank(), alone.size()) == (0, 1)
        assert mx.distributed.all_sum(mx.ones(3), group=alone).tolist() == [1, 1, 1]
        total = mx.compile(
            lambda x, t=tensor, d=data: mx.distributed.all_sum(mx.distributed.all_sum(x, group=t), group=d)
        )
        assert total(mx.full((5,), float(rank))).tolist() == [6.0] * 5
        gradient = mx.grad(lambda x, t=tensor: (mx.distributed.all_sum(x, group=t) * (rank + 1)).sum())
        assert gradient(mx.ones(2)).tolist() == [rank + 1.0] * 2
        other = tensor.rank() ^ 1
        if tensor.rank() == 0:
            mx.eval(mx.distributed.send(mx.array([rank]), other, group=tensor))
        else:
            assert mx.distributed.recv((1,), mx.int32, other, group=tensor).item() == row[0]


def colors() -> None:
    """Any numbers; a negative one is that of no group, and the world goes on."""
    assert members(group.split(0)) == list(range(size))
    large = group.split(2**31 - 1, 2**31 - 1 - rank)
    assert members(large) == list(range(size))[::-1]
    alone = group.split(rank)
    assert members(alone) == [rank]
    others = group.split(-1 if rank == 0 else 7)
    assert (others is None) == (rank == 0)
    if others is not None:
        assert members(others) == list(range(1, size))
    assert group.split(-1) is None
    same_key = group.split(0, 5)
    assert members(same_key) == list(range(size))
    assert members(group) == list(range(size))


def split_of_a_split() -> None:
    without_last = group.split(0 if rank < size - 1 or size == 2 else -1)
    if without_last is not None:
        reversed_ = without_last.split(0, without_last.size() - without_last.rank())
        assert members(reversed_) == members(without_last)[::-1]
        del without_last  # what was made of it stays
        gc.collect()
        again = reversed_.split(reversed_.rank() % 2)
        assert members(again) == members(reversed_)[reversed_.rank() % 2 :: 2]
    group.barrier()


def during_lazy_operations() -> None:
    """The world computes in MLX's threads while groups are made, and both come right."""
    x = mx.full((200_000,), float(rank + 1))
    for _ in range(30):
        x = mlxdist.all_sum(x) / size
    mx.async_eval(x)
    parts = [group.split(rank // 2), group.split(rank % 2), group.mlx.split(0)]
    assert parts[0].size() == 2 and parts[2].size() == size
    assert np.allclose(np.array(x), (size + 1) / 2)
    assert mlxdist.all_sum(mx.ones(2), group=parts[1]).tolist() == [2, 2]


def many() -> None:
    """Groups come and go, in another order on every rank."""
    kept = []
    random = np.random.default_rng(rank)
    for i in range(150):
        part = group.split((rank + i) % 2)
        assert mlxdist.all_sum(np.array(rank), group=part) == sum(
            r for r in range(size) if (r + i) % 2 == (rank + i) % 2
        )
        kept.append(part)
        while len(kept) > 20:
            kept.pop(random.integers(len(kept)))
    for part in kept:
        assert part.size() == 2
    assert members(group) == list(range(size))


def end_with_the_world() -> None:
    """With all that they have started; a later use raises an error."""
    part, other = group.split(rank % 2), group.split(0)
    of_mlx = group.mlx.split(rank // 2)
    try:
        part.finalize()
    except mlxdist.InvalidArgument as error:
        assert "finalize the group of mlxdist.init()" in str(error)
    else:
        raise AssertionError("a part of the world has ended by itself")
    x = mx.full((100_000,), float(rank))
    for _ in range(10):
        x = mx.distributed.all_sum(mlxdist.all_sum(x, group=part), group=of_mlx) / size
    mx.async_eval(x)
    # On a group of its own: MLX's threads start theirs when they come to it.
    handle = mlxdist.all_sum(np.ones(100_000, np.float32), group=other, async_op=True)
    lazy = [mlxdist.all_sum(mx.ones(3), group=part), mx.distributed.all_sum(mx.ones(3), group=of_mlx)]
    group.finalize()
    assert np.allclose(np.array(x), sum(range(size)) / size), x
    assert np.all(handle.wait() == size)
    uses = [lambda y=y: mx.eval(y) for y in lazy]
    uses += [part.barrier, part.stats, lambda: part.mlx, lambda: part.split(0), lambda: of_mlx.split(0)]
    uses += [lambda: mlxdist.all_sum(mx.ones(3), group=part), lambda: mlxdist.all_sum(np.ones(3), group=part)]
    for use in uses:
        try:
            use()
        except mlxdist.InvalidArgument as error:
            assert "has been finalized" in str(error), error
        else:
            raise AssertionError("a group works after the end of the world")
    assert "finalized" in repr(part) and (of_mlx.rank(), of_mlx.size()) == (rank % 2, 2)


def registered() -> None:
    """Registered memory of every kind gives the same results, on every group; it may be released at any time."""
    part = group.split(0, size - rank)
    total = sum(range(1, size + 1))
    x = np.full(1_000_000, rank + 1.0, np.float32)
    own = mx.full((1_000_000,), float(rank + 1))
    with group.register(x) as registration, part.register(own) as of_mlx, group.register(bytearray(10)):
        assert registration.nbytes == of_mlx.nbytes == 4_000_000 and "4000000 bytes" in repr(registration)
        for g in (group, part):
            for _ in range(3):
                assert np.all(mlxdist.all_sum(x, group=g) == total)
                assert mx.all(mlxdist.all_sum(own, group=g) == total).item()
        own += 1  # another array; the registered memory stays
        assert mx.all(mlxdist.all_sum(own) == total + size).item()
    registration.release()
    assert repr(registration) == "<mlxdist.Registration, released>"
    assert np.all(mlxdist.all_sum(x) == total)
    for _ in range(50):  # dropped without being released, at the same address again and again
        y = np.full(300_000, rank + 1.0, np.float32)
        group.register(y)
        assert np.all(mlxdist.all_sum(y, out=y) == total)
    globals()["kept"] = group.register(x)  # released by the end of the world


def counted() -> None:
    """Operations and bytes are counted by the group they belong to."""
    part = group.split(0)
    before, of_world = part.stats(), group.stats()
    for _ in range(5):
        mlxdist.all_sum(np.ones(1000, np.float32), group=part)
    mx.eval(mlxdist.all_sum(mx.ones(1000), group=part))
    after = part.stats()
    assert after["collectives"] - before["collectives"] == 6
    assert after["payload_bytes_sent"] - before["payload_bytes_sent"] >= 6 * 4000
    assert group.stats()["payload_bytes_sent"] == of_world["payload_bytes_sent"]
    assert part.algorithm("all_sum", 1000) in ("direct", "mesh", "ring", "recursive_doubling", "tree")
    assert part.algorithm("broadcast", np.ones(1000)) in ("direct", "mesh", "ring", "tree")
    try:
        part.algorithm("send", 10)
    except mlxdist.InvalidArgument as error:
        assert "'send' is no operation with a choice" in str(error)
    else:
        raise AssertionError("send has an algorithm")


def threads() -> None:
    """Each thread starts operations in a group of its own, when it comes to it: in any order between groups."""
    parts = [group.split(0, rank if i % 2 else size - rank) for i in range(4)]

    def work(number: int) -> None:
        part, random = parts[number], np.random.default_rng([rank, number])
        for i in range(40):
            x = np.full(int(np.random.default_rng([number, i]).integers(1, 60_000)), rank + 1.0, np.float32)
            handles = [mlxdist.all_sum(x, group=part, async_op=True), mlxdist.barrier(group=part, async_op=True)]
            time.sleep(random.random() * 0.002)
            for j in random.permutation(2):
                handles[j].wait()
            assert np.all(handles[0].result == sum(range(1, size + 1)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def opposite(run) -> None:
    one, other = group.split(0), group.split(0)
    operations = [lambda: run(mlxdist.all_sum, (3,), one), lambda: run(mlxdist.all_gather, (5,), other)]
    for operation in operations:  # all is well in one order
        operation()
    group.barrier()
    begin = time.monotonic()
    try:
        for operation in operations if rank == 0 else reversed(operations):
            operation()
    except mlxdist.Error as error:
        print(f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}", flush=True)
        sys.exit(1)


def opposite_blocking() -> None:
    opposite(lambda operation, shape, g: operation(np.ones(shape, np.float32), group=g))


def opposite_lazy() -> None:
    opposite(lambda operation, shape, g: mx.eval(operation(mx.ones(shape), group=g)))


def caught_error(kind: str) -> None:
    """The ranks disagree in a split, and the program goes on."""
    world: Any = group.mlx if kind == "mx" else group
    try:
        if rank == 0:
            world.split(0)
        else:
            mlxdist.all_sum(np.ones(3))
    except (mlxdist.Mismatch, RuntimeError) as error:
        assert "ranks disagree" in str(error)
    else:
        raise AssertionError("there was no error")


run_scenario(globals())
