"""async_op: operations that go on by themselves, and what their handles say."""

import mlx.core as mx
import numpy as np
import pytest

import mlxdist

SCENARIOS = [
    "every_operation",
    "overlap",
    "looking",
    "waiting_for_a_while",
    "many_in_flight",
    "opposite_order",
    "dropped",
    "dropped_behind_running_ones",
    "outlive_their_group",
    "threads",
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_handles(run_scenarios, scenario, ranks):
    run_scenarios("handles.py", ranks, scenario)


def test_waiting_for_handles_of_overlapping_groups_in_opposite_order(run_scenarios):
    run_scenarios("handles.py", 4, "overlapping_groups")


@pytest.mark.parametrize("scenario", ["mismatch", "dropped_mismatch", "finalize_waits", "finalize_gives_up"])
def test_failed_operations(run_ranks, scenario):
    for output in run_ranks("handles.py", 2, scenario, resident=False):
        assert "passed" in output
        assert "Traceback" not in output


def test_in_a_group_of_one():
    x = np.arange(3.0)
    handle = mlxdist.all_sum(x, async_op=True)
    assert isinstance(handle, mlxdist.Handle) and handle.done() and handle.exception() is None
    assert np.array_equal(handle.wait(), x) and handle.result is handle.wait(0)
    assert mlxdist.barrier(async_op=True).wait() is None
    out = bytearray(3)
    assert mlxdist.all_gather(b"abc", out=out, async_op=True).wait() is out and out == b"abc"


def test_mlx_arrays_have_their_own_way():
    with pytest.raises(mlxdist.InvalidArgument, match="mx.async_eval"):
        mlxdist.all_sum(mx.ones(3), async_op=True)
    with pytest.raises(mlxdist.InvalidArgument, match="dtype is one of MLX|needs a peer, but the group has one rank"):
        mlxdist.recv((3,), mx.float32, 1, async_op=True)


def test_bad_input_is_rejected_at_once():
    with pytest.raises(mlxdist.InvalidArgument, match="complex128"):
        mlxdist.all_sum(np.zeros(3, np.complex128), async_op=True)
