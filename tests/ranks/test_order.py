"""The order of operations is the program's: it is taken when an operation is evaluated, on whatever stream, and two
ranks that disagree on it get a Mismatch that names both."""

import re

import pytest

RANKS = [2, 3, pytest.param(4, marks=pytest.mark.long)]


def right(outputs):
    assert all("right" in output for output in outputs), outputs


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
def test_streams_that_are_late_on_other_ranks(run_ranks, ranks):
    right(run_ranks("order.py", ranks, "streams", 60))


@pytest.mark.parametrize("ranks", RANKS)
def test_large_operations_behind_which_others_come_first(run_ranks, ranks):
    right(run_ranks("order.py", ranks, "large_first"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_thread_evaluates_and_one_sends(run_ranks, ranks):
    right(run_ranks("order.py", ranks, "evaluates_and_sends", 100))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_threads_with_lanes(run_ranks, ranks):
    right(run_ranks("order.py", ranks, "lanes", 60))


def test_threads_one_after_the_other_need_no_lanes(run_ranks):
    right(run_ranks("order.py", 2, "threads_one_after_the_other", 20))


def test_a_pool_of_threads_needs_no_lanes(run_ranks):
    right(run_ranks("order.py", 3, "a_pool_of_threads", 20))


def test_what_may_differ_between_ranks(run_ranks):
    right(run_ranks("order.py", 2, "legal"))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("scenario", "sides"),
    {
        "labels_differ": ["in layers.1.q_norm #1", "in layers.1.k_norm #1"],
        "gathers_of_sequences_differ": ["in layers.1.self_attn #1", "in layers.1.mlp #1"],
        "labels_of_gradients_differ": ["in block #1,", "in block #1 backward;"],
        "units_differ": ["in layers.0 gather #1", "in layers.1 gather #1"],
        "experts_differ": [".switch_mlp #1", "in one that is not called here"],
        "threads_without_lanes": ["from thread 1 of its group", "from thread 2 of its group", "Group.lane"],
    }.items(),
)
def test_another_order_is_a_mismatch_on_every_rank(run_ranks, scenario, sides, ranks):
    for output in run_ranks("order.py", ranks, scenario, status=1):
        text = re.search(r"mlxdist\..*Mismatch: (.*)", output)
        assert text and all(side in text[1] for side in sides), output


def test_lanes_of_other_names(run_ranks):
    for output in run_ranks("order.py", 2, "lanes_differ", status=1):
        assert re.search(r"Mismatch: .* calls split in lane (same|other)", output), output


def test_a_place_that_is_left_void_fails_all(run_ranks):
    for output in run_ranks("order.py", 2, "void", status=1):
        assert "Aborted: all_sum does not run: a test" in output


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("faults", ["", pytest.param("drop=1/200", marks=pytest.mark.long)])
def test_random_operations(run_ranks, ranks, faults):
    """The soak: by hand with a million."""
    environment = {"MLXDIST_INJECT_FAULTS": faults} if faults else {}
    right(run_ranks("order.py", ranks, "soak", 400, ranks, environment=environment))
