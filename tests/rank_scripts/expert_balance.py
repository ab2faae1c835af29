"""One rank of test_expert_balance.py. Prints "balanced" at the end.

Each rank has a share of the tokens; every rank also computes, from all tokens, what one process alone would.
"""

import mlx.core as mx
import numpy as np
import pytest

import mlxdist
from mlxdist.nn.expert_parallel.load_balancing import BalanceBias

group = mlxdist.init()
rank, size = group.rank(), group.size()
EXPERTS, TOP_K, WIDTH, STEPS = 12, 3, 6, 150
OWNERS = [e * size // EXPERTS for e in range(EXPERTS)]


def shares(step: int) -> list[mx.array]:
    """All ranks' tokens of a step: different numbers of them, sometimes none."""
    key = mx.random.key(step)
    return [mx.random.normal((24 * ((r + step) % (size + 1)) + 8 * (r == 0), WIDTH), key=key) for r in range(size)]


def skewed(x: mx.array) -> mx.array:
    """Scores of a router that prefers the first experts to the last."""
    router = mx.random.normal((WIDTH, EXPERTS), key=mx.random.key(1000)) / WIDTH**0.5
    return mx.sigmoid(x @ router + mx.linspace(1.5, -1.5, EXPERTS))


def a_skewed_router_becomes_balanced() -> None:
    balance = BalanceBias(EXPERTS, rate=0.02, owners=OWNERS)
    alone = np.zeros(EXPERTS, np.float32)
    loads = []
    for step in range(STEPS):
        tokens = shares(step)
        mine, _ = balance.choose(skewed(tokens[rank]), TOP_K)
        selected = np.concatenate([np.array(balance.choose(skewed(x), TOP_K)[0]).ravel() for x in tokens])
        counts = np.bincount(selected, minlength=EXPERTS)
        loads.append(balance.update(mine))
        np.testing.assert_array_equal(loads[-1].counts, counts)
        alone += np.float32(0.02) * np.sign(counts.mean() - counts).astype(np.float32)
    assert np.array_equal(np.array(balance.bias), alone)
    bits = mlxdist.all_gather(np.array(balance.bias).view(np.uint32)).reshape(size, EXPERTS)
    assert (bits == bits[0]).all(), "the ranks hold different biases"
    before, after = sum(loads[1:21], loads[0]), sum(loads[-20:-1], loads[-1])
    assert before.imbalance > 1.5, before
    assert after.imbalance < 1.15 and after.idle == 0, after
    assert balance.load.total == sum(load.total for load in loads)
    assert balance.load.per_rank.sum() == balance.load.total and len(balance.load.per_rank) == min(size, EXPERTS)


def one_rank_without_tokens() -> None:
    balance = BalanceBias(4, rate=0.5)
    load = balance.update(mx.zeros((0, 2), mx.int32) if rank == size - 1 and size > 1 else mx.array([[0, 1], [0, 1]]))
    others = max(1, size - 1)
    assert load.counts.tolist() == [2 * others, 2 * others, 0, 0]
    assert balance.bias.tolist() == [-0.5, -0.5, 0.5, 0.5]
    balance.update(mx.zeros((0,), mx.uint32))  # no rank has any
    assert balance.bias.tolist() == [-0.5, -0.5, 0.5, 0.5]


def refused_on_all_ranks() -> None:
    balance = BalanceBias(4)
    with pytest.raises(mlxdist.InvalidArgument, match="2 indices of all ranks together are not from 0 to 3"):
        balance.update(mx.array([0, 4, -1] if rank == size - 1 else [1, 2, 3]))
    assert balance.bias.tolist() == [0, 0, 0, 0] and balance.load.total == 0
    balance.update(mx.array([1]))
    assert balance.bias.tolist()[1] < 0 < balance.bias.tolist()[0]
    if size > 1:
        with pytest.raises(mlxdist.Mismatch, match="disagree about the experts: 4 on rank 0, 5 on rank"):
            BalanceBias(4 + (rank == size - 1))


if __name__ == "__main__":
    a_skewed_router_becomes_balanced()
    one_rank_without_tokens()
    refused_on_all_ranks()
    print("balanced")
