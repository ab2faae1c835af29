"""Ranks that wait for each other in mx.eval, or beside idle threads: found. Threads that come late: no false alarm."""

import re

import pytest

IN_WORLD, IN_ONE, IN_OTHER = "in the world", r"in group 1 \(ranks 0, 1\)", r"in group 2 \(ranks 0, 1\)"

# What two ranks do, as both of them say it. The first rank is the one that is wrong.
MISTAKES = {
    "forgotten_group": ("all_sum", IN_WORLD, "all_sum", IN_ONE),
    "forgotten_group_of_item": ("all_sum", IN_WORLD, "all_sum", IN_ONE),
    "forgotten_group_evaluated_before": ("all_sum", IN_WORLD, "all_sum", IN_ONE),
    "forgotten_group_of_numpy": ("all_sum", IN_WORLD, "all_sum", IN_ONE),
    "other_order": ("all_sum", IN_ONE, "all_sum", IN_OTHER),
    "other_order_of_split": ("all_sum", IN_ONE, "split", IN_WORLD),
    "both_receive": ("recv", IN_ONE, "recv", IN_ONE),
    "both_receive_numpy": ("recv", IN_ONE, "recv", IN_ONE),
}

# Idle threads of which one waits without a limit, and does not keep ranks from being seen to be stuck; and of which
# one wakes up now and then.
BLOCKED = ["no_thread", "loader"]
WAKING = ["progress_bar", "polling_loader"]

QUICK = {("forgotten_group", "loader"), ("forgotten_group_of_numpy", "progress_bar"), "sleeping_thread", "prompt"}


def cases(scenarios, *threads):
    pairs = [(scenario, thread) for scenario in scenarios for thread in threads] if threads else list(scenarios)
    return [
        pytest.param(*([c] if isinstance(c, str) else c), marks=[] if c in QUICK else pytest.mark.long) for c in pairs
    ]


def circle(scenario: str) -> str:
    first, group, second, other = MISTAKES[scenario]
    array = r"(?: of float32 \[3\])?"
    return f"rank 0 calls {first}{array} {group} and waits for rank 1, rank 1 calls {second}{array} {other} and waits"


@pytest.mark.parametrize("scenario, thread", cases(MISTAKES, *BLOCKED))
def test_ranks_that_are_stuck_get_an_error_without_a_grace(run_ranks, scenario, thread):
    environment = {"MLXDIST_DEADLOCK_GRACE": "0"}
    for output in run_ranks("deadlock_threads.py", 2, scenario, thread, status=1, timeout=60, environment=environment):
        assert re.search(rf"Mismatch: ranks disagree: {circle(scenario)} for rank 0; none of them can go on", output), (
            output
        )


@pytest.mark.parametrize("scenario, thread", cases(MISTAKES, *WAKING))
def test_idle_threads_delay_the_error_by_the_grace(run_ranks, scenario, thread):
    environment = {"MLXDIST_DEADLOCK_GRACE": "1.5"}
    for output in run_ranks("deadlock_threads.py", 2, scenario, thread, status=1, timeout=60, environment=environment):
        assert re.search(rf"warn deadlock: ranks wait for each other: {circle(scenario)}", output), output
        error = rf"Mismatch: ranks disagree: {circle(scenario)} for rank 0; none of them has gone on for 1.5 s"
        assert re.search(error, output), output


@pytest.mark.long
def test_a_circle_of_three_subgroups(run_ranks):
    for output in run_ranks("deadlock_threads.py", 3, "other_subgroup", "loader", status=1, timeout=60):
        for rank, members in enumerate(["0, 1", "1, 2", "0, 2"]):
            assert re.search(rf"rank {rank} calls all_sum of float32 \[3\] in group \d \(ranks {members}\)", output), (
                output
            )


LATE = [
    "sleeping_thread",
    "computing_thread",
    "thread_with_a_timer",
    "thread_that_reads",
    "prompt",
    "slow_compiler",
    "slow_evaluation",
    "data_loader",
]


@pytest.mark.long
@pytest.mark.parametrize("scenario", cases(LATE))
def test_what_comes_after_the_grace_is_waited_for(run_ranks, scenario, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ntouch {tmp_path}/called\nsleep 4.5\nPATH="${{PATH#*:}}" exec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = {"MLXDIST_DEADLOCK_GRACE": "0.5", "SLOW_COMPILER": str(tmp_path), "MLXDIST_STALL_WARNING": "1"}
    outputs = run_ranks("deadlock_threads.py", 2, scenario, timeout=100, environment=environment)
    assert all("as expected" in output for output in outputs), outputs
    # What is said of a wait names both groups.
    wait = (
        r"all_sum #1 of float32 \[3\] in group 2 for rank 0, which has not entered it \(it is in all_sum #1 in group 1"
    )
    assert re.search(wait, outputs[1]), outputs[1]


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["late_thread", "late_timer"])
def test_a_thread_that_comes_after_the_default_grace(run_ranks, scenario):
    outputs = run_ranks("deadlock_threads.py", 2, scenario, timeout=120)
    assert all("as expected" in output for output in outputs), outputs


@pytest.mark.long
def test_the_grace_stands_still_while_a_rank_is_stopped(run_ranks, tmp_path):
    environment = {"MLXDIST_DEADLOCK_GRACE": "4", "FLAG": str(tmp_path / "flag")}
    outputs = run_ranks("deadlock_threads.py", 2, "stopped", timeout=100, environment=environment)
    assert all("as expected" in output for output in outputs), outputs
