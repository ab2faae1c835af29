"""The end of a job: no rank leaves while another misses something, however long a last message is lost."""

import pytest


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_the_last_messages_are_lost(run_ranks, ranks):
    """Rank 0 has met all others, and they have not heard of it: also not when they make their queue pairs anew."""
    outputs = run_ranks("finalize.py", ranks, "3")
    assert all(output.endswith("finalized\n") for output in outputs)


def test_a_rank_is_killed_meanwhile(run_ranks):
    """Those that have all they want wait for one that has not: they are told that it will never come."""
    outputs = run_ranks("finalize.py", 3, "2", "0.5", status=128 + 9)
    assert all("PeerLost: rank 2 " in output for output in outputs[:2])
