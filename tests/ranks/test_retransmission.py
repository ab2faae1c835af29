"""Messages get lost and arrive twice, as an unreliable connection may have it: every result is exact all the same."""

import ast

import pytest


def counters(run_ranks, ranks, faults):
    outputs = run_ranks("retransmission.py", ranks, faults, timeout=240)
    assert all("252 cases are exact" in output for output in outputs)
    each = [ast.literal_eval(output.splitlines()[0]) for output in outputs]
    return {name: sum(one[name] for one in each) for name in each[0]}


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 4))])
def test_lost_messages_are_sent_again(run_ranks, ranks):
    total = counters(run_ranks, ranks, "drop=1/100")
    assert total["provider_dropped_by_fault"] > 10
    assert total["retransmissions"] > 10


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_messages_that_come_twice_are_dropped_once(run_ranks, ranks):
    total = counters(run_ranks, ranks, "duplicate=1/20")
    assert total["provider_dropped_by_fault"] == 0
    assert total["duplicates"] > 10


@pytest.mark.long
def test_both_and_often(run_ranks):
    total = counters(run_ranks, 3, "drop=1/20,duplicate=1/10")
    assert total["provider_dropped_by_fault"] > 50 and total["retransmissions"] > 50 and total["duplicates"] > 50
