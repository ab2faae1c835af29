"""What operations cost, in the group's own counters: bytes, messages, copies. Exact, not about."""

import pytest
from rank_counts import one_to_four


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))])
@pytest.mark.parametrize("algorithm", ["direct", "mesh", "ring", "recursive_doubling", "tree"])
def test_payload(run_scenarios, algorithm, ranks):
    """2(n-1)/n of the array per rank for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all."""
    run_scenarios("counters.py", ranks, "payload", environment={"MLXDIST_ALGO": algorithm})


@pytest.mark.parametrize("ranks", [4, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 5))])
@pytest.mark.parametrize("algorithm", ["direct", "recursive_doubling", "tree"])
def test_messages_and_headers(run_scenarios, algorithm, ranks):
    run_scenarios("counters.py", ranks, "messages", environment={"MLXDIST_ALGO": algorithm})


def test_no_message_but_data_where_data_goes_both_ways(run_scenarios):
    run_scenarios("counters.py", 2, "no_control_messages")


@pytest.mark.parametrize("ranks", [2, 3])
def test_copies(run_scenarios, ranks):
    run_scenarios("counters.py", ranks, "copies", environment={"MLXDIST_ALGO": "direct"})


@one_to_four(3)
@pytest.mark.parametrize("kind", ["numpy", "mlx"])
def test_stats_by_operation(run_scenarios, kind, ranks):
    """Calls, bytes and seconds of every operation: they add up to the counters of `Group.stats`."""
    run_scenarios("operation_stats.py", ranks, "every_operation", kind, environment={"MLXDIST_ALGO": "direct"})


def test_stats_by_operation_of_mlx(run_scenarios):
    run_scenarios("operation_stats.py", 3, "of_mlx", environment={"MLXDIST_ALGO": "direct"})


@pytest.mark.parametrize("kind", ["numpy", "mlx"])
def test_a_failed_operation_is_no_call(run_scenarios, kind):
    run_scenarios("operation_stats.py", 2, "failed", kind, environment={"MLXDIST_ALGO": "direct"})
