"""Where links connect only some pairs of ranks: operations run around the ring of the links, or are rejected."""

import pytest


@pytest.mark.parametrize(
    ("ranks", "pairs"),
    [
        pytest.param(2, "0-1", marks=pytest.mark.long),
        pytest.param(3, "0-1,1-2,2-0", marks=pytest.mark.long),
        (4, "0-2,2-1,1-3,3-0"),
        pytest.param(5, "0-3,3-1,1-4,4-2,2-0", marks=pytest.mark.long),
    ],
)
def test_ring_of_cables(run_ranks, ranks, pairs):
    outputs = run_ranks("topology.py", ranks, "ring", environment={"MLXDIST_TOPOLOGY": pairs})
    assert all("exact" in output for output in outputs)


def test_cables_that_make_no_ring(run_ranks):
    outputs = run_ranks("topology.py", 4, "line", environment={"MLXDIST_TOPOLOGY": "0-1,1-2,2-3"}, status=None)
    assert all("InvalidArgument: all_reduce: the links of the 4 ranks make no ring" in output for output in outputs)


@pytest.mark.parametrize(
    ("pairs", "text"), [("0-7", "has the pair 0-7, but the ranks are 0 to 1"), ("1-1", "has the pair 1-1")]
)
def test_wrong_lists(run_ranks, pairs, text):
    outputs = run_ranks("topology.py", 2, "ring", environment={"MLXDIST_TOPOLOGY": pairs}, status=None)
    assert any(text in output for output in outputs)
