"""One rank of test_mpi_shim.py: programs that know only MLX, unless the scenario is about both.

Argument: the scenario. Prints "as expected" at the end.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.utils import average_gradients


def expect(kind: str, text: str, function: Callable[[], object]) -> None:
    """The classes are mlxdist's, whom these programs do not know."""
    try:
        result = function()
    except RuntimeError as error:
        assert type(error).__name__ == kind and text in str(error), f"{type(error)}: {error}"
    else:
        raise AssertionError(f"no {kind}, but {result}")


def total(x: mx.array, **group: mx.distributed.Group) -> list:
    return mx.distributed.all_sum(x, **group).tolist()


def accumulates_in_float32() -> None:
    """2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16: what MLX's own functions would compute."""
    rank, size = mx.distributed.init().rank(), mx.distributed.init().size()
    for dtype, large in ((mx.float16, 2048), (mx.bfloat16, 256)):
        x = mx.full((64,), large if rank == 0 else 1, dtype)
        expected = mx.array(float(large + size - 1)).astype(dtype).item()
        assert total(x) == [expected] * 64 and expected > large, total(x)


def two_streams() -> None:
    """Operations have the order in which they are evaluated, whichever stream comes first."""
    rank, size = mx.distributed.init().rank(), mx.distributed.init().size()
    streams = [mx.new_stream(mx.cpu) for _ in range(2)]
    sums_in_another_order(mx.distributed.all_sum, streams)
    parts = mx.distributed.init().split(rank % 2)
    sums_in_another_order(mx.distributed.all_sum, streams, parts)
    to, source = (rank + 1) % size, (rank - 1) % size
    for number in range(20):
        came = []
        for place, stream in enumerate(streams if number % 2 else streams[::-1]):
            x = late_if((rank + number) % 2 == place, mx.full((8,), 10.0 * number + place), stream)
            mx.async_eval(mx.distributed.send(x, to, stream=stream))
            came.append(mx.distributed.recv((8,), mx.float32, source, stream=streams[(rank + place) % 2]))
            mx.async_eval(came[-1])
        assert [one[0].item() for one in came] == [10.0 * number + place for place in range(2)], number


def two_streams_imported_before() -> None:
    """Another order of the streams is an error where the functions are MLX's own; and they know no newer streams."""
    all_sum, streams = mx.distributed.all_sum, [mx.new_stream(mx.cpu) for _ in range(2)]
    size = mx.distributed.init().size()
    assert all_sum(mx.ones((3,))).tolist() == [size] * 3
    new = mx.new_stream(mx.cpu)
    expect("InvalidArgument", "newer than mx.distributed.init()", lambda: mx.eval(all_sum(mx.ones((3,)), stream=new)))
    sums_in_another_order(all_sum, streams)


def messages_imported_before() -> None:
    """Messages of MLX's own functions are in one stream, that of the functions with its names, or an error."""
    send, recv, streams = mx.distributed.send, mx.distributed.recv, [mx.new_stream(mx.cpu) for _ in range(2)]
    rank, size = mx.distributed.init().rank(), mx.distributed.init().size()
    to, source = (rank + 1) % size, (rank - 1) % size
    for stream in streams:
        refused = "messages of two streams have no order"
        expect("InvalidArgument", refused, lambda stream=stream: mx.eval(send(mx.ones((8,)), to, stream=stream)))
        expect("InvalidArgument", refused, lambda stream=stream: mx.eval(recv((8,), mx.float32, source, stream=stream)))
    for number in range(20):
        came = []
        for place, by_name in enumerate([True, False] if number % 2 else [False, True]):
            stream = streams[place]
            x = late_if((rank + number) % 2 == place, mx.full((8,), 10.0 * number + place), stream)
            mx.async_eval(mx.distributed.send(x, to, stream=stream) if by_name else send(x, to))
            named = (rank + place) % 2
            came.append((mx.distributed.recv if named else recv)((8,), mx.float32, source))
            mx.async_eval(came[-1])
        assert [one[0].item() for one in came] == [10.0 * number + place for place in range(2)], number


def messages_of_threads() -> None:
    """Threads that come one after the other have a stream each, and may send and receive."""
    rank, size = mx.distributed.init().rank(), mx.distributed.init().size()

    def message(number: int) -> float:
        with mx.stream(mx.new_stream(mx.cpu)):
            mx.async_eval(mx.distributed.send(mx.full((8,), float(number)), (rank + 1) % size))
            return mx.distributed.recv((8,), mx.float32, (rank - 1) % size)[0].item()

    for number in range(5):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(message, number).result() == number


def late_if(late: bool, x: mx.array, stream: mx.Stream) -> mx.array:
    if not late:
        return x
    slow = mx.random.uniform(shape=(200, 200), stream=stream)
    return mx.add(x, mx.matmul(slow, slow, stream=stream)[0, 0] * 0, stream=stream)


def sums_in_another_order(
    all_sum: Callable[..., mx.array], streams: list[mx.Stream], group: mx.distributed.Group | None = None
) -> None:
    rank, size = mx.distributed.init().rank(), (group or mx.distributed.init()).size()
    for number in range(40):
        sums = []
        for place, stream in enumerate(streams):
            x = late_if((rank + number) % 2 == place, mx.full((8,), 2.0 * number + place, stream=stream), stream)
            sums.append(all_sum(x, group=group, stream=stream))
            mx.async_eval(sums[-1])
        found = [one[0].item() for one in sums]
        assert found == [(2.0 * number + place) * size for place in range(2)], (number, found)


def layers() -> None:
    """What an MLX training program does: averaged gradients, sharded layers, as in one process."""
    world = mx.distributed.init()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mx.random.seed(7)
    model.apply(lambda p: mx.random.normal(p.shape))
    x = mx.random.normal((4 * world.size(), 8))
    loss = nn.value_and_grad(model, lambda m, x: m(x).square().mean())
    _, whole = loss(model, x)
    _, own = loss(model, x[4 * world.rank() : 4 * world.rank() + 4])
    for averaged in (average_gradients(own), average_gradients(own, all_reduce_size=0)):
        for layer in range(2):
            for name, gradient in whole["layers"][layer].items():
                assert mx.allclose(averaged["layers"][layer][name], gradient, rtol=1e-4, atol=1e-4)
    if 8 % world.size() == 0:
        first = nn.layers.distributed.shard_linear(model.layers[0], "all-to-sharded")
        second = nn.layers.distributed.shard_linear(model.layers[1], "sharded-to-all")
        assert mx.allclose(second(first(x)), model(x), rtol=1e-4, atol=1e-4)


def graphs() -> None:
    """Lazy chains, in place where MLX donates, mx.compile, gradients, another stream, another thread."""
    world = mx.distributed.init()
    size = world.size()
    x = mx.ones((2048,))
    for _ in range(50):
        x = mx.distributed.all_sum(x) / size
    assert x.tolist() == [1.0] * 2048
    compiled = mx.compile(lambda x: mx.distributed.all_sum(x * 2) + 1)
    assert compiled(mx.ones((3,))).tolist() == [2.0 * size + 1] * 3
    assert mx.grad(lambda x: mx.distributed.all_sum(x).sum())(mx.ones((3,))).tolist() == [1.0] * 3
    with mx.stream(mx.new_stream(mx.cpu)):
        assert total(mx.ones((3,))) == [size] * 3
    results = []
    thread = threading.Thread(target=lambda: results.append(total(mx.ones((3,)))))
    thread.start()
    thread.join()
    assert results == [[size] * 3]
    scatter = mx.distributed.sum_scatter
    mine = mx.arange(2.0 * size)[2 * world.rank() :][:2] * size
    assert mx.array_equal(mx.compile(scatter)(mx.arange(2.0 * size)), mine)
    columns = mx.vmap(scatter, 1, 1)(mx.stack([mx.arange(2.0 * size)] * 3, 1))
    assert mx.array_equal(columns, mx.stack([mine] * 3, 1))
    weights = mx.array([1.0, 2.0]) + world.rank()
    slope = mx.grad(lambda x: (scatter(x) * weights).sum())(mx.ones((2 * size,)))
    assert slope.tolist() == [weight + rank for rank in range(size) for weight in (1.0, 2.0)]


def shim_and_mlxdist() -> None:
    """mlxdist and plain MLX in one program: the same ranks, and one engine that counts for both."""
    plain_first = os.environ["FIRST"] == "mlx"
    if plain_first:
        world = mx.distributed.init()
        assert total(mx.ones((3,))) == [world.size()] * 3
    import mlxdist

    group = mlxdist.init()
    before = group.stats()
    world = mx.distributed.init()
    assert (world.rank(), world.size()) == (group.rank(), group.size())
    assert before["collectives"] == (1 if plain_first else 0), before
    x = mx.ones((1000,))
    for _ in range(5):
        x = mx.distributed.all_sum(mlxdist.all_sum(mx.distributed.all_sum(x, group=group.mlx)))
    assert x.tolist() == [float(world.size() ** 15)] * 1000
    after = group.stats()
    assert after["collectives"] - before["collectives"] == 15
    assert after["payload_bytes_sent"] > before["payload_bytes_sent"]
    assert after["slab_bytes"] == before["slab_bytes"], "no second engine has made slabs"
    group.finalize()
    for read in (mx.eval, np.array):
        expect("InvalidArgument", "the group has ended", lambda: read(mx.distributed.all_sum(mx.ones((3,)))))


sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import waiting
from waiting import seconds_of


def orders_of_their_own() -> None:
    """A blocking call of mlxdist comes before or after MLX's operation, which waits in a stream, on each rank."""
    import mlxdist

    rank, size = mx.distributed.init().rank(), mx.distributed.init().size()
    for number in range(40):
        x = mx.full((8,), 2.0 * number)
        late = (rank + number) % 2 == 0
        if late:
            slow = mx.random.uniform(shape=(400, 400))
            x = x + (slow @ slow)[0, 0] * 0
        plain = mx.distributed.all_sum(x)
        lazy = mlxdist.all_sum(x - 1)
        mx.async_eval(plain)
        waiting.late(0 if late else 0.005)  # the stream comes to the first one, or not yet
        mx.async_eval(lazy)
        eager = mlxdist.all_sum(np.full(8, 2 * number + 1, np.float32))
        found = [lazy[0].item(), plain[0].item(), eager[0].item()]
        assert found == [(2.0 * number + one) * size for one in (-1, 0, 1)], (number, found)


def mlxdist_alone() -> None:
    """A program that calls mlxdist itself does not load the library."""
    import mlxdist

    assert mlxdist.all_sum(mx.ones((3,))).tolist() == [mlxdist.init().size()] * 3
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libmlxdist.so" in loaded and "libmlxdist_mpi" not in loaded


def disagree(**group: mx.distributed.Group) -> mx.array:
    """Differs in shape between the ranks."""
    return mx.distributed.all_sum(mx.full((3 + mx.distributed.init().rank(),), 7.0), **group)


READERS = {
    "eval": mx.eval,
    "tolist": lambda x: x.tolist(),
    # These ask for the buffer, and NumPy takes an error for "has none": without care they return unwritten memory.
    "np.array": np.array,
    "np.asarray": np.asarray,
    "np.sqrt": np.sqrt,
}


def reader(name: str) -> None:
    """Whatever reads the result of an operation that failed raises, and so does whatever is tried afterwards."""
    rank = mx.distributed.init().rank()
    expect("Mismatch", f"rank {rank} calls all_sum of float32 [{3 + rank}]", lambda: READERS[name](disagree()))
    for _ in range(3):
        expect("Mismatch", "ranks disagree", lambda: READERS[name](mx.distributed.all_gather(mx.ones((3,)))))
    for i in range(100):
        assert (mx.full((50,), float(i)) * 2).sum().item() == 100 * i, "MLX's stream works on"


def middle_of_an_element() -> None:
    """Rejected on every rank, before anything is sent, and the group goes on."""
    size = mx.distributed.init().size()
    shifted = mx.arange(9, dtype=mx.uint8)[1:].view(mx.float32)
    for read in (mx.eval, np.array):
        expect("InvalidArgument", "middle of an element", lambda: read(mx.distributed.all_sum(shifted)))
    assert mx.distributed.all_sum(shifted + 0).shape == (2,)
    assert total(mx.ones((3,))) == [size] * 3


def in_a_part() -> None:
    """An error in a part names what went wrong."""
    world = mx.distributed.init()
    part = world.split(0)
    assert total(mx.ones((3,)), group=part) == [world.size()] * 3
    expect("Mismatch", "ranks disagree", lambda: mx.eval(disagree(group=part)))


def no_color() -> None:
    world = mx.distributed.init()
    last = world.rank() == world.size() - 1
    if last:
        expect("InvalidArgument", "color -1 is in no group", lambda: world.split(-1))
    else:
        part = world.split(0)
        assert part.size() == world.size() - 1
        assert total(mx.ones((3,)), group=part) == [part.size()] * 3
    assert total(mx.ones((3,))) == [world.size()] * 3


def groups_let_go() -> None:
    """MLX lets go of a group while operations on it wait; many groups, one after the other."""
    world = mx.distributed.init()
    size = world.size()
    slow = mx.full((200_000,), 1.0)
    for _ in range(30):
        part = world.split(world.rank() % 2)
        x = slow
        for _ in range(3):
            x = mx.distributed.all_sum(x, group=part) / part.size()
        mx.async_eval(x)
        del part
        gc.collect()
        assert x[0].item() == 1.0
    assert total(mx.ones((3,))) == [size] * 3


def split_after_async() -> None:
    """A split waits for what the stream still has to do, so that all ranks have one order."""
    world = mx.distributed.init()
    for i in range(10):
        x = mx.full((100_000,), float(world.rank()))
        for _ in range(5):
            x = mx.distributed.all_max(x)
        if world.rank() == i % world.size():
            mx.async_eval(x)
        else:
            mx.eval(x)
        part = world.split(0)
        assert total(mx.ones((3,)), group=part) == [world.size()] * 3
        assert x[-1].item() == world.size() - 1


def pending_at_exit() -> None:
    """Operations without a wait still reach the other ranks, in whatever order the ranks end."""
    world = mx.distributed.init()
    x = mx.full((100_000,), float(world.rank() + 1))
    for _ in range(20):
        x = mx.distributed.all_sum(x) / world.size()
    mx.async_eval(x)
    globals()["kept"] = [x, world, world.split(0)]
    if world.rank() == 0:
        waiting.late(0.3)


def pending_behind_work_at_exit() -> None:
    """The last rank's program has ended, and MLX still computes what its operation sends."""
    world = mx.distributed.init()
    total(mx.ones((3,)))
    last = world.rank() == world.size() - 1
    x = mx.ones((500, 500))
    seconds, y = seconds_of(lambda: mx.eval(mx.matmul(x, x)))[0], x
    for _ in range(int(3 / seconds) + 1 if last else 0):
        y = mx.matmul(y, x) * 1e-9
    y = mx.distributed.all_sum(y)
    mx.async_eval(y) if last else mx.eval(y)


def pending_in_a_stream_at_exit() -> None:
    """The same in a stream of the program's own, as mlx-lm has it."""
    world = mx.distributed.init()
    with mx.stream(mx.new_thread_local_stream(mx.cpu)):
        x = mx.full((100_000,), float(world.rank() + 1))
        for _ in range(20):
            x = mx.distributed.all_sum(x) / world.size()
        mx.async_eval(x)


def without_streams_at_exit() -> None:
    """MLX's own test runner ends the streams before Python ends."""
    world = mx.distributed.init()
    assert total(mx.ones((3,))) == [world.size()] * 3
    mx.clear_streams()


def forked() -> None:
    """The end of a forked child does not touch the group."""
    world = mx.distributed.init()
    globals()["kept"] = world.split(0)
    assert total(mx.ones((3,))) == [world.size()] * 3
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        sys.exit(7)  # with all exit handlers, and MLX's statics
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert total(mx.ones((3,))) == [world.size()] * 3


def killed() -> None:
    world = mx.distributed.init()
    assert total(mx.ones((3,))) == [world.size()] * 3
    if world.rank() == world.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, _ = seconds_of(expect, "PeerLost", f"rank {world.size() - 1}", lambda: total(mx.ones((3,))))
    print(f"lost after {seconds:.1f} s", flush=True)
    sys.exit(1)


def killed_during_split() -> None:
    """MLX keeps Python's lock while it splits; the death of a rank is noticed all the same."""
    world = mx.distributed.init()
    assert total(mx.ones((3,))) == [world.size()] * 3
    if world.rank() == world.size() - 1:
        waiting.late(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, _ = seconds_of(expect, "PeerLost", f"rank {world.size() - 1}", lambda: world.split(0))
    print(f"lost after {seconds:.1f} s", flush=True)
    sys.exit(1)


def raises() -> None:
    world = mx.distributed.init()
    if world.rank() == world.size() - 1:
        raise ValueError("this rank's own mistake")
    total(mx.ones((3,)))


def cannot_join() -> None:
    """The last rank has a bad variable; no rank goes on as a group of one."""
    if int(os.environ["MLXDIST_RANK"]) == int(os.environ["MLXDIST_WORLD_SIZE"]) - 1:
        os.environ["MLXDIST_TIMEOUT"] = "soon"
    for _ in range(2):
        try:
            world = mx.distributed.init()
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        else:
            print(f"a group of {world.size()}", flush=True)
    sys.exit(1)


def cannot_import() -> None:
    sys.modules["mlxdist.runtime.mpi_shim"] = None  # as where mlxdist is not installed
    expect("RuntimeError", "mlxdist does not load in this Python", mx.distributed.init)


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    globals()[scenario](*arguments)
    print("as expected")
