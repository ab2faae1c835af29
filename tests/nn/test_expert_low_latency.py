"""The exchange of fixed shape: equal to a dense layer on one process, compiled once, refusals on all ranks alike."""

from rank_counts import one_to_four


@one_to_four()
def test_low_latency_exchange(run_ranks, ranks):
    """Any number of tokens, also none; every dtype and E4M3; experts in unequal numbers, all tokens to one of them."""
    assert all("exact" in output for output in run_ranks("expert_low_latency.py", ranks))
