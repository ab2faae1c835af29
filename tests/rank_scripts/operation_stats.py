"""One rank of test_counters.py: it checks what `Group.stats_by_operation` counts. Arguments: the scenario, and its own.

MLXDIST_ALGO is "direct", so that what each rank sends and receives follows from the operation alone.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist

CALLS = 3
ROWS, COLUMNS = 12 * size, 5
WHOLE, ROW = 4 * ROWS * COLUMNS, 4 * COLUMNS
PART = WHOLE // size
root = size - 1
others = size - 1
following, before = (rank + 1) % size, (rank - 1) % size

Array = np.ndarray | mx.array
Expected = tuple[Callable[[], object], int, int]  # a call; the bytes that it sends from this rank, and receives here


def collectives(x: Array) -> Iterator[tuple[str, Expected]]:
    at_root = rank == root
    for op in ("sum", "max", "min", "prod"):
        yield f"all_{op}", (lambda op=op: mlxdist.all_reduce(x, op), others * WHOLE, others * WHOLE)
        yield f"{op}_scatter", (lambda op=op: mlxdist.reduce_scatter(x, op), others * PART, others * PART)
        to_root = (0, others * WHOLE) if at_root else (WHOLE, 0)
        yield f"reduce ({op})", (lambda op=op: mlxdist.reduce(x, op, root), *to_root)
    yield "all_gather", (lambda: mlxdist.all_gather(x), others * WHOLE, others * WHOLE)
    yield "broadcast", (lambda: mlxdist.broadcast(x, root), *((others * WHOLE, 0) if at_root else (0, WHOLE)))
    yield "gather", (lambda: mlxdist.gather(x, root), *((0, others * WHOLE) if at_root else (WHOLE, 0)))
    yield "scatter", (lambda: mlxdist.scatter(x, root), *((others * PART, 0) if at_root else (0, PART)))
    yield "all_to_all", (lambda: mlxdist.all_to_all(x), others * PART, others * PART)
    yield "barrier", (mlxdist.barrier, 0, 0)
    # Rank i sends j + 1 rows to rank j.
    sends, receives = [to + 1 for to in range(size)], [rank + 1] * size
    rows = sum(sends)
    sent, received = (rows - rank - 1) * ROW, others * (rank + 1) * ROW
    yield "all_to_all_v", (lambda: mlxdist.all_to_all_v(x[:rows], sends, receives), sent, received)


def messages(x: Array) -> Iterator[tuple[str, Expected]]:
    """Round the ring; then from rank 0 to rank 1 alone."""
    if size == 1:  # a message needs another rank
        return
    received = (7, COLUMNS)  # another shape than what is sent
    kind = x.dtype if isinstance(x, np.ndarray) else mx.int32
    to = x if before == 0 else x[:7]
    shape = (ROWS, COLUMNS) if rank == 0 else received
    yield "sendrecv", (lambda: mlxdist.sendrecv(to, before, following, shape, kind), to.nbytes, 4 * np.prod(shape))
    if rank == 0:
        yield "send", (lambda: mlxdist.send(x, 1), WHOLE, 0)
    if rank == 1:
        yield "recv", (lambda: mlxdist.recv_like(x, 0), 0, WHOLE)


def require_nothing_but(counted: dict[str, dict], calls: dict[str, Expected]) -> None:
    """Each operation has been called ``CALLS`` times, with its bytes, and no other one ever."""
    assert counted.keys() == calls.keys() if size > 1 else counted == {}, counted
    for name, found in counted.items():
        _, sent, received = calls[name]
        expected = {"calls": CALLS, "payload_bytes_sent": CALLS * sent, "payload_bytes_received": CALLS * received}
        assert {key: found[key] for key in expected} == expected, f"{name} on rank {rank}: {found}, not {expected}"
        assert found["seconds"] > 0, f"{name} on rank {rank}: {found}"


def every_operation(kind: str) -> None:
    made = np.ones((ROWS, COLUMNS), np.int32)
    x = made if kind == "numpy" else mx.array(made)
    calls = dict(collectives(x)) | dict(messages(x))
    for call, _, _ in calls.values():
        for _ in range(CALLS):
            result = call()
            if kind == "mlx" and result is not None:
                mx.eval(result)
    counted, stats = group.stats_by_operation(), group.stats()
    require_nothing_but(counted, calls)
    for name in ("payload_bytes_sent", "payload_bytes_received"):
        assert sum(entry[name] for entry in counted.values()) == stats[name]
    point_to_point = {"send", "recv", "sendrecv"}
    assert stats["point_to_point"] == sum(counted[name]["calls"] for name in point_to_point & counted.keys())
    assert stats["collectives"] == sum(counted[name]["calls"] for name in counted.keys() - point_to_point)
    assert abs(sum(entry["seconds"] for entry in counted.values()) - stats["operation_ns"] / 1e9) < 1e-6


def of_mlx() -> None:
    """MLX's own operations, on the group of all ranks and on one made by split, count in their group alone."""
    pair = group.split(rank // 2, rank)
    for within in (group, pair):
        mx.eval(mx.distributed.all_sum(mx.ones((ROWS, COLUMNS)), group=within.mlx))
        moved = (within.size() - 1) * WHOLE
        found = within.stats_by_operation()
        assert found.keys() == ({"all_sum"} if within.size() > 1 else set()), found
        for entry in found.values():
            assert (entry["calls"], entry["payload_bytes_sent"], entry["payload_bytes_received"]) == (1, moved, moved)


def failed(kind: str) -> None:
    """The last rank calls another operation: what fails does not count, and what has ended before still does."""
    mlxdist.all_sum(np.ones(8, np.float32))
    counted, stats = group.stats_by_operation(), group.stats()
    x = np.ones(8 + (rank == size - 1), np.float32)
    try:
        mx.eval(mlxdist.all_sum(mx.array(x))) if kind == "mlx" else mlxdist.all_sum(x)
    except mlxdist.Mismatch:
        pass
    else:
        raise AssertionError("the ranks had other shapes, and none raised")
    assert counted["all_sum"]["calls"] == 1 and group.stats_by_operation() == counted
    assert all(group.stats()[name] == stats[name] for name in ("collectives", "operation_ns"))


run_scenario(globals())
