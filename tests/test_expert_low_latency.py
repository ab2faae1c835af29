"""The exchange of fixed shape: equal to a dense layer on one process, compiled once, refusals on all ranks alike."""

import pytest


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3, 4))]
)
def test_low_latency_exchange(run_ranks, ranks):
    """Any number of tokens, also none; every dtype and E4M3; experts in unequal numbers, all tokens to one of them."""
    assert all("exact" in output for output in run_ranks("expert_low_latency.py", ranks))
