"""One rank of test_counters.py: what the operations cost, by the group's counters. Argument: the scenario.

MLXDIST_ALGO says which algorithm. Sizes divide by the number of ranks, so that what is said of each rank is exact.
"""

import os
from collections.abc import Callable

import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist

HEADER, DESCRIPTOR = 64, 64  # of every message; of the first one of every stream besides
EAGER_BYTES, BULK_BYTES = 4096, 128 << 10

algorithm = os.environ.get("MLXDIST_ALGO", "auto")
root = size - 1
levels = size.bit_length() - 1  # log2, rounded down
paired = 2 * (size - (1 << levels))  # recursive doubling: N ranks join in pairs first


def cost(operation: Callable[[], object]) -> dict[str, int]:
    """How much each counter of this rank grows. No other operation may be going on."""
    before = group.stats()
    operation()
    after = group.stats()
    grown = {name: after[name] - before[name] for name in after}
    grown["data_messages"] = grown["messages_sent"] - grown["control_messages_sent"] - grown["retransmissions"]
    return grown


def require(counted: int, expected: int | float, what: str) -> None:
    assert counted == expected, f"rank {rank} of {size}, {algorithm}: {what} is {counted}, not {expected}"


def array(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes // 8, np.int64)


def doubled(whole: int) -> int:
    """What recursive doubling sends: each step all of it; an even one of a pair only what lets the other one work."""
    if rank < paired:
        return whole if rank % 2 == 0 else (levels + 1) * whole
    return levels * whole


# Bytes that this rank sends for an input of `whole` bytes, part = whole / size.


def all_reduce_bytes(whole: int) -> int:
    expected = {
        "direct": (size - 1) * whole,
        "mesh": 2 * (size - 1) * whole // size,
        "ring": 2 * (size - 1) * whole // size,
        "recursive_doubling": doubled(whole),
        "tree": whole if rank else (size - 1) * whole,
    }[algorithm]
    assert algorithm != "recursive_doubling" or expected <= (levels + 1) * whole
    return expected


def broadcast_bytes(whole: int) -> int:
    part = (size - 1) * whole // size
    node, children = (rank - root) % size, 0
    bit = 1
    while node + bit < size and not node & bit:
        children, bit = children + 1, 2 * bit
    return {
        "direct": (size - 1) * whole if rank == root else 0,
        "tree": children * whole,
        "mesh": 2 * part if rank == root else part,
        "ring": 0 if (rank + 1) % size == root else whole,
    }[algorithm]


def reduce_bytes(whole: int) -> int:
    if algorithm == "ring":
        return 2 * (size - 1) * whole // size
    if rank != root:
        return whole
    return (size - 1) * whole // size if algorithm == "mesh" else 0


def payload() -> None:
    """All bytes that move are the user's: what the algorithm must move, and no more."""
    has = {
        "all_sum": ("direct", "mesh", "ring", "recursive_doubling", "tree"),
        "all_gather": ("direct", "ring"),
        "reduce_scatter": ("direct", "ring"),
        "broadcast": ("direct", "mesh", "ring", "tree"),
        "reduce": ("direct", "mesh", "ring", "tree"),
        "all_to_all": ("direct",),
        "gather": ("direct",),
        "scatter": ("direct",),
    }
    for whole in (8 * size, 8 * size * 50, 8 * size * 40_000):
        x, parts = array(whole), whole // size
        others = (size - 1) * parts
        expected = {
            "all_sum": (lambda x=x: mlxdist.all_sum(x), all_reduce_bytes),
            "all_gather": (lambda x=x: mlxdist.all_gather(x), lambda whole: (size - 1) * whole),
            "reduce_scatter": (lambda x=x: mlxdist.reduce_scatter(x, "max"), lambda whole, o=others: o),
            "broadcast": (lambda x=x: mlxdist.broadcast(x, root), broadcast_bytes),
            "reduce": (lambda x=x: mlxdist.reduce(x, "sum", root), reduce_bytes),
            "all_to_all": (lambda x=x: mlxdist.all_to_all(x), lambda whole, o=others: o),
            "gather": (lambda x=x: mlxdist.gather(x, root), lambda whole: 0 if rank == root else whole),
            "scatter": (lambda x=x: mlxdist.scatter(x, root), lambda whole, o=others: o if rank == root else 0),
        }
        for name, (operation, sent) in expected.items():
            if algorithm not in has[name]:
                continue
            grown = cost(operation)
            require(grown["payload_bytes_sent"], sent(whole), f"payload of {name} of {whole} bytes")
            sums = np.array([grown["payload_bytes_sent"], grown["payload_bytes_received"]])
            sent_by_all, received_by_all = mlxdist.all_sum(sums)
            require(received_by_all, sent_by_all, f"payload that all receive in {name} of {whole} bytes")
            require(grown["collectives"], 1, f"number of operations in {name}")


def messages() -> None:
    """Small operations: one message to each partner. Headers are counted apart, and the provider agrees."""
    x = array(800 * size)
    # One for each partner; of a pair in doubling the even rank sends once, the odd one once more than the others.
    doubling = doubled(1)
    everyone = size - 1
    expected = {"direct": {"all_sum": everyone, "all_gather": everyone, "all_to_all": everyone, "barrier": everyone}}
    expected["recursive_doubling"] = {"all_sum": doubling, "barrier": (size - 1).bit_length()}
    expected["tree"] = {"all_sum": 1 if rank else everyone}
    operations = {
        "all_sum": lambda: mlxdist.all_sum(x),
        "all_gather": lambda: mlxdist.all_gather(x),
        "all_to_all": lambda: mlxdist.all_to_all(x),
        "barrier": mlxdist.barrier,
    }
    for name, count in expected[algorithm].items():
        grown = cost(operations[name])
        require(grown["data_messages"], count, f"messages of {name}")
        require(
            grown["header_bytes_sent"],
            count * (HEADER + DESCRIPTOR) + grown["control_messages_sent"] * HEADER,
            f"header bytes of {name}",
        )
        require(grown["provider_sends"], grown["messages_sent"], f"sends of the provider in {name}")
        if grown["retransmissions"] == 0:
            all_bytes = grown["payload_bytes_sent"] + grown["header_bytes_sent"]
            require(grown["provider_bytes_sent"], all_bytes, f"bytes of the provider in {name}")
    # Large: as many messages as slots are filled, one descriptor for all of them.
    x = array(8 * 100_000)
    pieces = -(-x.nbytes // (BULK_BYTES - HEADER - DESCRIPTOR))
    grown = cost(lambda: mlxdist.all_to_all(np.resize(x, 100_000 * size)))
    require(grown["data_messages"], pieces * (size - 1), "messages of a large all_to_all")
    header = (size - 1) * (pieces * HEADER + DESCRIPTOR) + grown["control_messages_sent"] * HEADER
    require(grown["header_bytes_sent"], header, "header bytes of a large all_to_all")


def no_control_messages() -> None:
    """Where data goes both ways, acknowledgements ride on it. A rank that the machine keeps from running for 10 ms
    has to be distinguished, so the quietest of ten turns counts."""
    for nbytes in (8, 2048, 100_000):
        x = array(nbytes)
        turns = []
        for _ in range(10):
            grown = cost(lambda x=x: [mlxdist.all_sum(x, out=x) for _ in range(300)])
            require(grown["provider_dropped"], 0, "sends that met no receive")
            require(grown["data_messages"], 300, f"messages of 300 all_sum of {nbytes} bytes")
            require(grown["bytes_copied"], 300 * x.nbytes, f"bytes that 300 all_sum of {nbytes} bytes copy")
            turns.append(grown["control_messages_sent"] + grown["retransmissions"])
        assert min(turns) == 0, f"rank {rank}: acknowledgements without a ride, or repetitions: {turns}"


def copies() -> None:
    """A message is copied once, into its slot: the reducing rank reads it there. What is received as it
    is costs a copy more."""
    x = array(8 * size * 2000)
    require(cost(lambda: mlxdist.all_sum(x, out=x))["bytes_copied"], (size - 1) * x.nbytes, "copies of all_sum")
    grown = cost(lambda: mlxdist.reduce_scatter(x))
    require(grown["bytes_copied"], (size - 1) * x.nbytes // size, "copies of reduce_scatter")
    grown = cost(lambda: mlxdist.all_gather(x))
    require(grown["bytes_copied"], (2 * (size - 1) + 1) * x.nbytes, "copies of all_gather, with the own part")


run_scenario(globals())
