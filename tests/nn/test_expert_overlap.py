"""Dispatch and combine in flight: equal to the synchronous ones; what was hidden is counted."""

import pytest
from rank_counts import one_to_four

from mlxdist.nn.expert_parallel.overlap import Overlap


@one_to_four(2)
def test_overlapped_exchange(run_ranks, ranks):
    """Every dtype and E4M3, ranks without tokens, two micro-batches in flight, refusals."""
    assert all("equal" in output for output in run_ranks("expert_overlap.py", ranks))


def test_what_is_hidden():
    overlap = Overlap(in_flight=0.010, waited=0.004)
    assert overlap.hidden == pytest.approx(0.006) and overlap.share == pytest.approx(0.6)
    assert str(overlap) == "10.000 ms of communication: 6.000 ms hidden (60%), 4.000 ms waited for"
    assert Overlap(0.001, 0.002).hidden == 0 and Overlap(0.0, 0.0).share == 0
