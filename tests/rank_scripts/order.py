"""One rank of test_order.py. Arguments: the scenario, and what it takes. One needs mlx-lm."""

import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import mlxdist
from mlxdist.nn.expert_parallel.switch_glu import ExpertParallelSwitchGLU, set_path
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.label import label_scope

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import waiting

group = mlxdist.init()
rank, size = group.rank(), group.size()
odd_one = rank == size - 1
ranks_sum = size * (size - 1) // 2


def value(number: int, shape: tuple[int, ...] = (5,)) -> np.ndarray:
    """This rank's input of operation ``number``: exact in float32, and another one for each operation."""
    return np.full(shape, number * size + rank, np.float32)


def total(number: int) -> int:
    return number * size * size + ranks_sum


def late(x: mx.array, stream: mx.Stream) -> mx.array:
    """``x``, once the thread of the stream has computed for some milliseconds."""
    slow = mx.random.uniform(shape=(300, 300), stream=stream)
    for _ in range(4):
        slow = mx.matmul(slow, slow, stream=stream) * (1 / 150)
    zero = mx.minimum(mx.abs(slow.sum(stream=stream), stream=stream), 0, stream=stream)
    return mx.add(x, zero, stream=stream)


def streams(count: int) -> None:
    """Operations of one group on several streams, each of which is late on another rank."""
    several = [mx.new_stream(mx.cpu) for _ in range(3)]
    results = []
    for number in range(count):
        stream = several[number % 3]
        x = mx.array(value(number))
        if (number + rank) % size == 0:
            x = late(x, stream)
        result = mlxdist.all_sum(x, stream=stream)
        mx.async_eval(result)
        results.append(result)
        if number % 7 == 3:  # NumPy arrays and handles have places between them
            assert (mlxdist.all_sum(value(number)) == total(number)).all()
        if number % 11 == 5:
            handle = mlxdist.all_gather(value(number, (1,)), async_op=True)
            assert handle.wait().tolist() == [number * size + r for r in range(size)]
    for number, result in enumerate(results):
        assert (np.array(result) == total(number)).all(), (number, result, total(number))


def large_first() -> None:
    """What is large waits for the peer to come, and what comes later in the order is sent before it."""
    stream, other = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    length = 700_000
    for number in range(4):
        x = mx.array(value(number, (length,)))
        first = mlxdist.broadcast(late(x, stream) if rank == number % size else x, root=number % size, stream=stream)
        second = mlxdist.broadcast(x + 1, root=(number + 1) % size, stream=other)
        third = mlxdist.all_sum(x, stream=other)
        mx.async_eval(first)
        mx.async_eval(second)
        mx.async_eval(third)
        assert (np.array(third) == total(number)).all()
        assert (np.array(second) == number * size + (number + 1) % size + 1).all()
        assert (np.array(first) == number * size + number % size).all()


def evaluates_and_sends(count: int) -> None:
    """One thread evaluates and one sends, in one group."""
    mlxdist.barrier()  # the main thread is the first of the group on all ranks

    def pass_on() -> None:
        for number in range(count):
            if rank % 2 == 0 and rank + 1 < size:
                mlxdist.send(value(number), rank + 1)
            elif rank % 2:
                received = mlxdist.recv((5,), np.float32, rank - 1)
                assert (received == number * size + rank - 1).all(), (number, received)

    thread = threading.Thread(target=pass_on)
    thread.start()
    for number in range(count):
        assert (np.array(mlxdist.all_sum(mx.array(value(number)))) == total(number)).all()
    thread.join()


def lanes(count: int) -> None:
    """Two threads, each with a lane, which come in any order."""
    own = {name: group.lane(name) for name in ("a", "b")}
    assert own["a"] is group.lane("a") and own["a"] is not own["b"]

    def use(name: str, factor: int) -> None:
        delays = random.Random(rank * 7 + factor)
        for number in range(count):
            waiting.late(delays.random() * 0.002)
            x = value(number) * factor
            for result in (mlxdist.all_sum(x, group=own[name]), mlxdist.all_sum(mx.array(x), group=own[name])):
                assert (np.array(result) == factor * total(number)).all()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(use, "a", 1), pool.submit(use, "b", 3)]:
            done.result()


def lanes_differ() -> None:
    group.lane("other" if odd_one else "same")


def threads_without_lanes() -> None:
    """Two threads in one group, whose collectives overlap and come in an order of chance."""

    def use(count: int) -> None:
        delays = random.Random(rank * 7 + count)
        for number in range(count):
            waiting.late(delays.random() * 0.002)
            mlxdist.all_sum(value(number, (20_000,)))

    mlxdist.barrier()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(use, 2000)
        use(2000)
        done.result()


def a_pool_of_threads(count: int) -> None:
    """One task at a time, in threads that are others on each rank."""
    with ThreadPoolExecutor(3) as pool:
        for _ in range(rank):
            pool.submit(waiting.late, 0.2)
        for number in range(count):
            assert (pool.submit(lambda number=number: mlxdist.all_sum(value(number))).result() == total(number)).all()
            assert (mlxdist.all_sum(value(number)) == total(number)).all()


def threads_one_after_the_other(count: int) -> None:
    """One at a time, always a new one: each has the number of the one before."""
    for number in range(count):
        found: list[np.ndarray] = []
        thread = threading.Thread(target=lambda number=number: found.append(mlxdist.all_sum(value(number))))
        thread.start()
        thread.join()
        assert (found[0] == total(number)).all()
        assert (mlxdist.all_sum(value(number)) == total(number)).all()


def labels_differ() -> None:
    """Two sums of the same dtype and shape, in another order on one rank."""
    sums = []
    for path in ("layers.1.q_norm", "layers.1.k_norm"):
        with label_scope(path):
            sums.append(mlxdist.all_sum(mx.ones((8,))))
    for result in reversed(sums) if odd_one else sums:
        mx.eval(result)


def gathers_of_sequences_differ() -> None:
    """As above, of the gathers of sequence parallelism, which are the bridge's own."""
    gathered = []
    for path in ("layers.1.self_attn", "layers.1.mlp"):
        with label_scope(path):
            gathered.append(mlxdist.nn.gather_from_sequence_parallel_region(mx.ones((8,))))
    for result in reversed(gathered) if odd_one else gathered:
        mx.eval(result)


def labels_of_gradients_differ() -> None:
    """One rank is in the backward pass of what another calls."""
    with label_scope("block"):
        if odd_one:
            ones = mx.ones((size, 2))
            _, (gradient,) = mx.vjp(lambda x: mlxdist.all_to_all(x), [ones], [ones])
            mx.eval(gradient)
        else:
            x = mlxdist.all_to_all(mx.ones((size, 2)))
            mx.eval(x, mlxdist.all_to_all(x))


def units_differ() -> None:
    """One rank calls another unit of fully_shard than the others."""
    from mlxdist.train import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    x = mx.ones((1, 8))
    for layer in reversed(model.layers) if odd_one else model.layers:
        x = layer(x)
    mx.eval(x)


def experts_differ() -> None:
    """One rank computes the gradient of other experts, of the same shapes, than the others."""
    from mlx_lm.models.switch_layers import SwitchGLU

    experts = ExpertParallelSwitchGLU.from_switch(SwitchGLU(8, 16, 4), group=group)
    set_path(experts, f"layers.{int(odd_one)}.switch_mlp")
    mx.eval(mx.grad(lambda x: experts(x, mx.zeros((1, 1), mx.int32)).sum())(mx.ones((1, 8))))


def legal() -> None:
    """What may differ between ranks: lines, compiled functions, what has no label."""
    x = mx.array(value(1))

    def layer(x: mx.array) -> mx.array:
        with label_scope("layer"):
            return mlxdist.all_sum(x) * 0.5

    function: Callable = mx.compile(layer) if odd_one else layer
    for _ in range(3):
        assert (np.array(function(x)) == total(1) / 2).all()
    root = mlxdist.broadcast(x, root=0) if rank == 0 else mlxdist.broadcast(x, root=0)
    assert (np.array(root) == size).all()
    with label_scope("only here" if odd_one else None):
        assert (np.array(mlxdist.all_sum(x)) == total(1)).all()
    mixed = mx.distributed.all_sum(x, group=group.mlx) if odd_one else layer(x) * 2
    assert (np.array(mixed) == total(1)).all()
    checkpointed: Callable = mx.checkpoint(layer) if odd_one else layer
    gradient = mx.grad(lambda x: (checkpointed(x) ** 2).sum())(x)
    assert (np.array(gradient) == total(1) / 2).all()


def void() -> None:
    """An operation has its place and is not carried out: no peer waits for it."""
    if odd_one:
        from mlxdist.runtime.native import ffi, lib

        call = ffi.new("mlxdist_call *", {"timeout": -1})
        native = ffi.cast("mlxdist_group *", engine_of(group).connection.group)
        lib.mlxdist_enqueue(native, call, lib.MLXDIST_ALL, lib.MLXDIST_ALL)
        lib.mlxdist_group_abort(native, lib.MLXDIST_ABORTED, b"all_sum does not run: a test")
    mlxdist.all_sum(value(1))


class Soak:
    """Random operations, the same on all ranks, at times that differ; every value is checked."""

    def __init__(self, seed: int) -> None:
        self.choices, self.times = random.Random(seed), random.Random(seed * 1000 + rank)
        self.streams = [mx.new_stream(mx.cpu) for _ in range(3)]
        reversed_ranks = group.split(0, size - rank)
        assert reversed_ranks is not None
        self.groups = [group, group.lane("lane"), reversed_ranks]
        self.pending: deque[Callable[[], None]] = deque()

    def run(self, count: int) -> None:
        for number in range(count):
            self.step(number)
            while len(self.pending) > 20 or (self.pending and self.choices.random() < 0.3):
                self.pending.popleft()()
        while self.pending:
            self.pending.popleft()()

    def step(self, number: int) -> None:
        number = number % 50_000 + 1  # exact in float32
        kind = self.choices.choice(["sum", "sum", "sum", "numpy", "handle", "compiled", "gradient", "max", "scattered"])
        where, stream = self.choices.choice(self.groups), self.choices.choice(self.streams)
        shape = (self.choices.choice([1, 7, 7, 300, 40_000]),)
        x = value(number, shape)
        wanted = np.full(shape, total(number), np.float32)
        if kind == "numpy":
            self.check(mlxdist.all_sum(x, group=where), wanted)
        elif kind == "handle":
            handle = mlxdist.all_sum(x, group=where, async_op=True)
            self.pending.append(lambda: self.check(handle.wait(), wanted))
        else:
            lazy = self.lazy(kind, mx.array(x), where, stream)
            mx.async_eval(lazy)
            if kind == "max":
                wanted = np.full(shape, number * size + size - 1, np.float32)
            self.pending.append(lambda: self.check(np.array(lazy), wanted))

    def lazy(self, kind: str, x: mx.array, where: mlxdist.Group, stream: mx.Stream) -> mx.array:
        if self.times.random() < 0.02:
            x = late(x, stream)
        if kind == "compiled":
            return mx.compile(lambda x: mlxdist.all_sum(x * 1, group=where, stream=stream) + 0)(x)
        if kind == "gradient":  # that of a sum_scatter is an all_gather of the cotangents
            whole = mx.tile(x, (size,))
            _, (gathered,) = mx.vjp(lambda y: mlxdist.sum_scatter(y, group=where, stream=stream), [whole], [x])
            return gathered.reshape(size, -1).sum(0)
        if kind == "max":
            return mlxdist.all_max(x, group=where, stream=stream)
        if kind == "scattered":
            return mlxdist.sum_scatter(mx.tile(x, (size,)), group=where, stream=stream)
        return mlxdist.all_sum(x, group=where, stream=stream)

    def check(self, found: np.ndarray, wanted: np.ndarray) -> None:
        assert np.array_equal(found, wanted), (found.ravel()[:4], wanted.ravel()[:4])


def soak(count: int, seed: int) -> None:
    Soak(seed).run(count)


scenario, *arguments = sys.argv[1:]
globals()[scenario](*map(int, arguments))
print("right", flush=True)
