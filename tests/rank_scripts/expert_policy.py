"""One rank of test_expert_policy.py. Prints "alike" at the end."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxdist
from mlxdist.nn.expert_parallel.dispatch import combine, dispatch, route
from mlxdist.nn.expert_parallel.placement import Placement
from mlxdist.nn.expert_parallel.policy import COLLECTIVES, MODES, Policy, Workload, calibrate

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late

group = mlxdist.init()
rank, size = group.rank(), group.size()


def alike(values: np.ndarray, what: str) -> None:
    everyone = mlxdist.all_gather(values[None])
    assert (everyone == everyone[0]).all(), f"{what} differ: {everyone}"


def measured_and_chosen_alike() -> None:
    """Ranks that are slow at different times measure and choose the same."""
    late(0.02 * rank)
    link = calibrate(repeats=3)
    assert (link.provider, link.ranks, link.measured) == (group.provider, size, True)
    numbers = [link.plan, *(value for name in COLLECTIVES for value in vars(link.costs[name]).values())]
    alike(np.array(numbers).view(np.uint64), "calibrations")
    assert all(number > 0 for number in numbers) or size == 1, link
    policy = Policy(link, cooldown=3)
    random = np.random.default_rng(1)
    selected = []
    for call in range(200):
        tokens = int(2 ** random.uniform(0, 14))
        if call % 50 == rank:
            late(0.005)
        mode = policy.choose(tokens, top_k=2, hidden=64, itemsize=4, sharded=call % 2 == 0)
        selected.append(MODES.index(mode))
    alike(np.array(selected), "choices")
    for line in str(policy).splitlines():  # times are in it, and equal
        alike(np.frombuffer(line.ljust(200).encode(), np.uint8), "tables")
    assert not size > 1 or "measured: plan" in str(policy)


def refused() -> None:
    with pytest.raises(mlxdist.InvalidArgument, match="repeats must be at least 1, not 0"):
        calibrate(repeats=0)


def sent(call) -> int:
    before = group.stats()["payload_bytes_sent"]
    mx.eval(call())
    return group.stats()["payload_bytes_sent"] - before


def bytes_are_those_of_the_model() -> None:
    """What the engine counts. 96 KiB and more, so that all_sum is not sent directly where ranks are many."""
    tokens, hidden, k = 512 * size, 64, 3
    x = mx.ones((tokens, hidden))
    measured = {
        "all_sum": sent(lambda: mlxdist.all_sum(x)),
        "all_gather": sent(lambda: mlxdist.all_gather(x[:512])),
        "sum_scatter": sent(lambda: mlxdist.sum_scatter(x)),
        "all_to_all_v": dispatched(x[:512], k),
    }
    for mode in MODES:
        for sharded in (True, False):
            model = dict.fromkeys(COLLECTIVES, 0.0)
            for name, nbytes in Workload(k, hidden, 4, sharded).parts(mode, tokens, size):
                model[name] += nbytes
            for name, nbytes in model.items():  # experts are drawn: 512 tokens are within 10 % of what is expected
                assert nbytes in (0, pytest.approx(measured[name], rel=0.1)), (mode, sharded, name, measured, nbytes)


def dispatched(x: mx.array, k: int) -> int:
    """Rows, weights and rows back, without the plan: experts selected equally often and independently."""
    placement = Placement(4 * size, size)
    indices = mx.random.randint(0, 4 * size, (len(x), k), key=mx.random.key(rank))
    planned = route(indices, placement, group)

    def there_and_back() -> mx.array:
        y, _, handle = dispatch(x, handle=planned)
        return combine(y, handle, mx.ones((len(x), k)))

    return sent(there_and_back)


if __name__ == "__main__":
    measured_and_chosen_alike()
    refused()
    bytes_are_those_of_the_model()
    print("alike")
