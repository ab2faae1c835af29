"""Ranks that wait for each other: found at once, on all ranks; and groups that work at the same time, which is none."""

import re

import pytest

# What is said of both sides.
MISTAKES = {
    "split_and_all_sum": ["split", "all_sum"],
    "handle_and_return": ["all_sum", "finalize"],
    "lazy_and_return": ["all_sum", "finalize"],
    "handle_and_finalize": ["all_sum", "finalize"],
    "recv_and_return": ["recv", "finalize"],
    "recv_and_recv": ["recv", "recv"],
    "malformed": ["recv", "recv"],
    "recv_and_barrier": ["recv", "barrier"],
    "send_and_send": ["send", "send"],
    "handles_crossed": ["all_sum of float32 [3] in group 1", "all_sum of float32 [3] in group 2"],
    "lazy_crossed": ["all_sum of float32 [3] in group 1", "all_sum of float32 [3] in group 2"],
    "lazy_crossed_while_asleep": ["all_sum of float32 [3] in group 1", "all_sum of float32 [3] in group 2"],
    "lazy_recv_and_recv": ["recv", "recv"],
    "two_lines": ["all_sum"],
}
# In the default run.
QUICK = {"split_and_all_sum", "handle_and_return", "recv_and_recv", "recv_and_barrier", "lazy_crossed"}

# No mistakes, but ranks that wait for about a second.
STALLS = {
    "link_down": 3,
    "delayed": 2,
    "ended_group": 2,
    "daemon_thread": 2,
    "raw_thread": 2,
    "named_thread": 2,
    "dummy_thread": 2,
    "evaluating_thread": 2,
    "evaluates_else": 2,
    "queued": 2,
}
QUICK_STALLS = {"link_down", "ended_group"}


@pytest.mark.parametrize(
    "scenario", ["async_eval_and_eager", "threads", "handles_and_eager", pytest.param("late", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_groups_at_the_same_time(run_ranks, scenario, ranks):
    assert all("as expected" in output for output in run_ranks("deadlock.py", ranks, scenario))


@pytest.mark.parametrize(
    "scenario, ranks",
    [
        pytest.param(scenario, ranks, marks=[] if scenario in QUICK_STALLS else pytest.mark.long)
        for scenario, ranks in STALLS.items()
    ],
)
def test_ranks_that_wait_and_go_on(run_ranks, scenario, ranks):
    assert all("as expected" in output for output in run_ranks("deadlock.py", ranks, scenario, timeout=60))


@pytest.mark.parametrize(
    "scenario, ranks",
    [
        pytest.param(scenario, 3 if number % 2 else 2, marks=[] if scenario in QUICK else pytest.mark.long)
        for number, scenario in enumerate(MISTAKES)
    ],
)
def test_ranks_that_wait_for_each_other(run_ranks, scenario, ranks):
    texts = set()
    for rank, output in enumerate(run_ranks("deadlock.py", ranks, scenario, status=1, timeout=20)):
        error = re.search(r"^(\w+) after ([0-9.]+) s: (.*?)(\[rank .*)?$", output, re.MULTILINE)
        assert error, f"rank {rank} reported no error:\n{output}"
        assert error[1] == "Mismatch" and float(error[2]) < 5, error[0]
        assert all(side in error[3] for side in MISTAKES[scenario]), error[0]
        texts.add(error[3])
    assert len(texts) == 1, texts
