"""One rank of test_late_peers.py: rank 1 is late where rank 0 has GPU work that waits for it.

Arguments: what, the seconds that rank 1 is late, the seconds after which the device ends work that waits; a directory.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

late, limit = float(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["MLXDIST_RANK"])
directory = Path(os.environ["TMPDIR"])  # of this rank: each compiles kernels for itself, as on two hosts

import mlx.core as mx

import mlxdist
from mlxdist.runtime.native import bridge

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import waiting
from waiting import seconds_of

TEXT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)


class Gpu:
    """Stands in for a GPU of macOS: what is submitted may wait for a limited time.

    MLX hands the operations of a graph to their threads in async_eval, and the GPU work that depends on them is
    submitted there; what happens before it returns happens before the submission.
    """

    def run(self, array: mx.array) -> mx.array:
        mx.async_eval(array)
        waited, _ = seconds_of(mx.eval, array)
        if waited > limit:
            raise RuntimeError(TEXT)
        return array


gpu = Gpu()
group = mlxdist.init()
other = 1 - rank


def is_late(which: int = 1, times: float = 1.0) -> None:
    if rank == which:
        waiting.late(times * late)


def total() -> None:
    assert gpu.run(mlxdist.all_sum(mx.ones(3)))[0].item() == 2


def warm_up() -> None:
    """Until no operation meets on any rank."""
    import numpy as np

    for _ in range(20_000):
        met = group.stats()["meetings"]
        for _ in range(50):
            total()
        if mlxdist.all_sum(np.array([group.stats()["meetings"] - met]))[0] == 0:
            return
    raise AssertionError("the ranks go on meeting")


def loads() -> None:
    is_late()
    total()


def stops() -> None:
    """In a pause between two steps."""
    warm_up()
    if rank == 1:
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep {late}; kill -CONT {me}"])
    waiting.late(min(0.8, late / 2))
    total()


def compiles() -> None:
    """Kernels, in the middle of the first graph: those of MLX's CPU backend are compiled where they are encoded."""
    if rank == 1:
        compiler = directory / "g++"
        compiler.write_text(f'#!/bin/sh\nsleep {late}\nexec {shutil.which("g++")} "$@"\n')
        compiler.chmod(0o755)
        os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"

    @mx.compile
    def kernel(x: mx.array) -> mx.array:
        return mx.exp(mx.abs(x) * 0 + 1) * 2

    # Kernels of other ranks are compiled at the same time; what is measured is how much longer rank 1 needs.
    total = mlxdist.all_sum(kernel(mlxdist.all_sum(mx.ones(3))))
    assert abs(gpu.run(total)[0].item() - 4 * 2.718281828) < 1e-3
    assert (directory / "mlx").is_dir(), list(directory.iterdir())


def receives() -> None:
    is_late()
    if rank == 1:
        mx.eval(mlxdist.send(mx.ones(3), 0))
    else:
        assert gpu.run(mlxdist.recv_like(mx.ones(3), 1))[0].item() == 1


def sends() -> None:
    """A rank that sends does not wait for the receiver, which first has to receive something else."""
    is_late()
    if rank == 1:
        first = mlxdist.recv((3,), mx.float32, 0)
        assert first[0].item() == 1
        mx.eval(mlxdist.send(first, 0))
    else:
        assert seconds_of(mx.async_eval, mlxdist.send(mx.ones(3), 1))[0] < late / 2
        assert mlxdist.recv_like(mx.ones(3), 1)[0].item() == 1


def meets() -> None:
    is_late()
    waited, _ = seconds_of(mlxdist.meet)
    assert rank == 1 or waited > late / 2
    met = group.stats()["meetings"]
    for _ in range(50):
        total()  # the first ones after it meet where the peer is not known to be there: it may have to compile
    assert group.stats()["meetings"] > met


def meets_late() -> None:
    is_late()
    mlxdist.meet(timeout=late / 4)


def gives_up() -> None:
    """Rank 1 does not come within MLXDIST_TIMEOUT."""
    is_late()
    mx.eval(mlxdist.all_sum(mx.ones(3)))


def deadline() -> None:
    """A deadline of the operation itself begins when it is carried out: the meeting only does not outlast it."""
    group.barrier()
    is_late()
    try:
        waited, _ = seconds_of(lambda: mx.eval(mlxdist.all_sum(mx.ones(3), timeout=1.5 * late)))
        assert rank == 1 or waited > late / 2
    except mlxdist.Timeout as error:
        raise AssertionError("it has waited for the peer before its deadline began") from error
    is_late(times=3)

    def is_in_time() -> bool:
        try:
            mx.eval(mlxdist.all_sum(mx.ones(3), timeout=late / 2))
        except mlxdist.Timeout:
            return False
        return True

    waited, in_time = seconds_of(is_in_time)
    assert not in_time, "rank 1 came in time"
    assert rank == 1 or 0.9 * late < waited < 2.5 * late


# Programs that would wait for ever if a meeting waited for all that comes before it.


def ring() -> None:
    """Every rank hands its receive over before its send."""
    size = group.size()
    first, second = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    got = mlxdist.recv_like(mx.ones(3), (rank - 1) % size, stream=first)
    sent = mlxdist.send(mx.ones(3) * rank, (rank + 1) % size, stream=second)
    mx.eval(sent, got)
    assert got[0].item() == (rank - 1) % size


def pipeline() -> None:
    """Rank 0 is late: every rank behind it stays on the CPU, though another one waits for each."""
    x = mx.ones(3)
    is_late(0)
    if rank:
        x = gpu.run(mlxdist.recv_like(x, rank - 1))
    if rank + 1 < group.size():
        mx.eval(mlxdist.send(x + 1, rank + 1))
    assert x[0].item() == rank + 1


def through_calls() -> None:
    """Rank 0 has to send before the others, which wait in direct calls, can send what it receives."""
    import numpy as np

    first, second = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    x = np.ones(3, np.float32)
    if rank == 0:
        got = mlxdist.recv_like(mx.ones(3), 1, stream=first)
        mx.eval(mlxdist.send(mx.ones(3), 2, stream=second), got)
    elif rank == 1:
        mlxdist.send(mlxdist.recv((3,), np.float32, 2), 0)
    else:
        mlxdist.recv((3,), np.float32, 0)
        mlxdist.send(x, 1)


def held_back() -> None:
    """The same, where another rank waits for this one to receive."""
    import numpy as np

    first, second = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    large = 1 << 20
    if rank == 0:
        got = mlxdist.recv_like(mx.ones(3), 1, stream=first)
        mx.eval(mlxdist.recv_like(mx.ones(large), 2, stream=second), got)
    elif rank == 1:
        mlxdist.send(mlxdist.recv((3,), np.float32, 2), 0)
    else:
        mlxdist.send(np.ones(large, np.float32), 0)
        mlxdist.send(np.ones(3, np.float32), 1)


def handles() -> None:
    """A collective with a handle has no order among those of other groups."""
    import numpy as np

    beside = group.split(0)
    handle = mlxdist.all_sum(np.ones(3), group=beside, async_op=True) if rank == 0 else None
    mx.eval(mlxdist.all_sum(mx.ones(3)))
    handle = handle or mlxdist.all_sum(np.ones(3), group=beside, async_op=True)
    assert handle.wait()[0] == group.size()


def handle_in_circle() -> None:
    """Rank 2 waits for a collective with a handle that rank 0 starts after the operation it meets for."""
    import numpy as np

    pairs = [group.split(int(rank in pair), rank) for pair in ((0, 1), (0, 2), (1, 2))]
    stream = mx.new_stream(mx.cpu)
    if rank == 0:
        total = mlxdist.all_sum(mx.ones(3), group=pairs[0], stream=stream)
        mx.async_eval(total)
        mlxdist.all_sum(np.ones(3), group=pairs[1], async_op=True).wait()
        mx.eval(total)
    elif rank == 1:
        mlxdist.all_sum(np.ones(3), group=pairs[2])
        mx.eval(mlxdist.all_sum(mx.ones(3), group=pairs[0]))
    else:
        mlxdist.all_sum(np.ones(3), group=pairs[1], async_op=True).wait()
        mlxdist.all_sum(np.ones(3), group=pairs[2])


def p2p() -> None:
    """Sends and receives of a pair are not in the same order on both sides."""
    x = mx.ones(3)
    steps = {
        0: (lambda: mlxdist.send(x, 1), lambda: mlxdist.recv_like(x, 1), lambda: mlxdist.send(x, 2)),
        1: (lambda: mlxdist.send(x, 0), lambda: mlxdist.recv_like(x, 2), lambda: mlxdist.recv_like(x, 0)),
        2: (lambda: mlxdist.recv_like(x, 0), lambda: mlxdist.send(x, 1)),
    }
    for step in steps[rank]:
        mx.eval(step())


def refuse() -> None:
    """An operation that all ranks refuse, since not all are joined by cables, is handed over before another one: their
    counts stay equal."""

    def refuses(call) -> None:
        try:
            call()
        except mlxdist.InvalidArgument:
            print("refused", flush=True)

    first = mlxdist.all_to_all(mx.ones(group.size()))
    refuses(lambda: mx.eval(first))
    for _ in range(4):
        refuses(lambda: waiting.late(0.05))  # the first error is also raised where the program is then
    group.barrier()
    # Of an array from memory: what MLX had computed when the error was raised has that error for good.
    second, total = mlxdist.all_to_all(mx.ones(group.size())), mlxdist.all_sum(mx.array([1.0, 1, 1]))
    refuses(lambda: mx.async_eval(second))
    if rank == 0:
        refuses(lambda: waiting.late(late))
    waited, _ = seconds_of(refuses, lambda: mx.async_eval(total))
    assert waited < 5 * late, "the counts of the ranks differ"
    for _ in range(3):  # the error of the second may come first
        refuses(lambda: mx.eval(total))
    assert mlxdist.all_sum(mx.ones(3))[0].item() == group.size()


def req() -> None:
    """Another thread counts an operation during the meeting: it must not be waited for."""
    import threading

    import numpy as np

    beside = group.split(0)
    group.barrier()
    if rank == 0:

        def send() -> None:
            waiting.late(late / 4)
            mlxdist.send(np.ones(3), 1, group=beside)

        thread = threading.Thread(target=send)
        thread.start()
        assert seconds_of(mx.eval, mlxdist.recv_like(mx.ones(3), 1))[0] < 1.5 * late
        thread.join()
    else:
        is_late(times=0.5)
        mx.eval(mlxdist.send(mx.ones(3), 0))
        mx.synchronize()
        is_late(times=1.5)
        mlxdist.recv((3,), np.float64, 0, group=beside)


def one_is_late() -> None:
    """The last rank is late: what each other one sends to it meanwhile is bounded, and no rank floods the others."""
    is_late(group.size() - 1)
    before = group.stats()["meeting_messages"]
    total = mlxdist.all_sum(mx.ones(3))
    mx.eval(total)
    messages = group.stats()["meeting_messages"] - before
    assert messages <= 4 * group.size() + 6 + late, messages


def aborted() -> None:
    is_late()
    if rank == 1:
        group.abort("there is no point in going on")
    else:
        mx.eval(mlxdist.all_sum(mx.ones(3)))


def mixed() -> None:
    """Calls that are carried out at once, started ones, lazy ones, parts of nothing: all ranks count them alike."""
    import numpy as np

    half = group.split(rank % 2)
    mlxdist.all_sum(np.ones(3)) if rank else mx.eval(mlxdist.all_sum(mx.ones(3, mx.float64, stream=mx.cpu)))
    for turn in range(60):
        handle = mlxdist.all_sum(np.ones(3), async_op=True)
        received = mlxdist.all_to_all_v(mx.ones((2 * rank, 3)), [0, 2 * rank], [0, 2 * rank])
        mx.eval(received)
        handle.wait()
        mx.eval(mlxdist.sendrecv(mx.ones(2), other, other), mlxdist.all_gather(mx.ones(2)))
        if turn % 20 == 0:
            waiting.late(0.4)
        try:
            mx.eval(mlxdist.send(mx.ones(2), rank))
        except mlxdist.InvalidArgument:
            half.barrier()
        total()


def demo() -> None:
    """Steps of the demo's training and tokens of its generation cost no message of a meeting, after the first ones."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import mlx_lm
    import train_and_generate as example
    from rich.console import Console

    beside = group.split(0)

    def count(counts: list[int], first: int) -> None:
        """After 5 steps or tokens come enough other operations that the first ones, which meet, are over."""
        counts.append(group.stats()["meeting_messages"])
        for _ in range(256 if len(counts) == first + 5 else 0):
            mlxdist.barrier(group=beside)

    steps, tokens, length = [], [], 30
    note, generate = mlxdist.set_step, mlx_lm.stream_generate
    mlxdist.set_step = lambda *of: (count(steps, 0), note(*of))
    mlx_lm.stream_generate = lambda *of, **k: (t for t in generate(*of, **k) if count(tokens, length) is None)
    out = Path(sys.argv[4])
    checkpoints, text = example.Checkpoints(out / "checkpoints", 10_000, False), example.prose()
    tokenizer = example.make_tokenizer(text, out)
    corpus = example.np.array(tokenizer.encode(text))
    model, _ = example.train(corpus, length, 0, checkpoints, Console(quiet=True))
    example.save(model, tokenizer, out)
    example.generate_sharded(out, "The", length)
    sharded = tokens[length:]  # before, every rank generates with the whole model
    for counts in (steps, sharded):
        print(counts, flush=True)
        assert len(counts) == length and counts[0] < counts[5] and counts[8] == counts[-1], counts


def translated() -> None:
    """MLX's text becomes the error that names the late rank, on all ranks; without one it stays what it is."""
    try:
        bridge.raise_mlx_error(TEXT)
    except RuntimeError as error:
        assert str(error) == TEXT and not isinstance(error, mlxdist.Error)
    is_late()
    try:
        total()
        bridge.raise_mlx_error("[metal::malloc] Out of memory")
    except RuntimeError as error:
        assert not isinstance(error, mlxdist.Error), error
    try:
        if rank == 0:
            bridge.raise_mlx_error(TEXT)
        while True:
            total()
    except mlxdist.Timeout as error:
        print(error)
        assert error.rank == 0


globals()[sys.argv[1]]()
print("came", flush=True)
