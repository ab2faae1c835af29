"""Many ranks on one machine: connections on first use, and how much memory they take."""

import re

import pytest


def peers(output: str) -> int:
    match = re.search(r"(\d+) peers", output)
    assert match, output
    return int(match[1])


@pytest.mark.long
def test_sixteen_ranks(run_ranks):
    outputs = run_ranks("sixteen_ranks.py", 16, "matrix", timeout=120)
    assert all("exact" in output for output in outputs)
    assert all(peers(output) == 15 for output in outputs)  # all_to_all needs them all


@pytest.mark.long
def test_sixteen_ranks_in_a_ring_connect_to_their_neighbors_alone(run_ranks):
    outputs = run_ranks("sixteen_ranks.py", 16, "ring_only", timeout=120, environment={"MLXDIST_ALGO": "ring"})
    assert [peers(output) for output in outputs] == [2] * 16


MORE = [pytest.param(*case, marks=pytest.mark.long) for case in ((9, 9, 8, 8), (9, 8, 1, 4), (16, 2, 4, 4))]


@pytest.mark.parametrize("ranks, at_start, fewest, most", [(3, 3, 2, 2), (3, 2, 1, 2), *MORE])
def test_connections_at_the_start(run_ranks, ranks, at_start, fewest, most):
    """Up to MLXDIST_ON_DEMAND_THRESHOLD ranks all connect with all. More: recursive doubling needs log2(n) peers, and
    the partner of a pair where n is no power of two."""
    environment = {"MLXDIST_ON_DEMAND_THRESHOLD": str(at_start)}
    counts = [peers(output) for output in run_ranks("sixteen_ranks.py", ranks, "slabs", environment=environment)]
    assert (min(counts), max(counts)) == (fewest, most)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_memory_for_slots(run_ranks, ranks):
    """At most 16 MiB a rank with eight of them."""
    for output in run_ranks("sixteen_ranks.py", ranks, "slabs"):
        match = re.search(r"(\d+) peers, (\d+) bytes", output)
        assert int(match[1]) == ranks - 1 and int(match[2]) <= 16 << 20
