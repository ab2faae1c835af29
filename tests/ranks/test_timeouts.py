"""Deadlines: of an operation, of a group, of the job; and what an operation that has missed its own says."""

import inspect
import re

import pytest

import mlxdist

OPERATIONS = sorted(
    {*mlxdist._MODULES["runtime.operations.collectives"], *mlxdist._MODULES["runtime.operations.point_to_point"]}
    - {"get_rank", "get_world_size"}
)
OPERATIONS.remove("is_available")


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_one(name):
    assert inspect.signature(getattr(mlxdist, name)).parameters["timeout"].default is None


@pytest.mark.parametrize(
    "scenario, operation",
    [
        pytest.param(["all_operations", "numpy"], "all_sum #14", marks=pytest.mark.long),
        pytest.param(["all_operations", "mlx"], "all_sum #14", marks=pytest.mark.long),
        (["handles"], "all_sum #2"),
        pytest.param(["barriers"], "barrier #4", marks=pytest.mark.long),
        pytest.param(["groups"], "all_sum #1", marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_an_operation_has_its_own_or_that_of_its_group(run_ranks, scenario, operation):
    """The last one has that of the group, which is too short, and says so: on both ranks, with the same text."""
    outputs = run_ranks("timeouts.py", 2, *scenario, status=1)
    said = [re.search(rf"^{operation} of rank 1 on \S+: (rank 1 waited .*)$", output, re.M) for output in outputs]
    assert all(said), outputs
    assert said[0][1] == said[1][1]
    assert re.search(rf"for rank 0, which has not entered it.*\[rank 1 on \S+ in {operation}.*\]$", said[1][1])


def test_the_backward_pass_has_that_of_the_forward_pass(run_ranks):
    run_ranks("timeouts.py", 2, "gradients")


@pytest.fixture
def alone():
    group = mlxdist.init()
    yield group
    group.timeout = None


def test_the_group_s_can_be_read_and_set(alone):
    assert alone.timeout is None
    alone.timeout = 12.5
    assert alone.timeout == 12.5 and mlxdist.init().timeout == 12.5
    assert mlxdist.init(timeout=3).timeout == 3 and alone.split(0).timeout == 3


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "soon", 1e10])
def test_what_is_no_deadline_is_rejected(alone, seconds):
    import numpy as np

    with pytest.raises(mlxdist.InvalidArgument, match=r"Group.timeout: timeout is .*, but must be a number of seconds"):
        alone.timeout = seconds
    assert alone.timeout is None
    for x in (np.ones(3), mlxdist.runtime.operations.collectives.mx.ones(3)):
        with pytest.raises(mlxdist.InvalidArgument, match="all_sum: timeout is"):
            mlxdist.all_sum(x, timeout=seconds)
    with pytest.raises(mlxdist.InvalidArgument, match="mlxdist.init: timeout is"):
        mlxdist.init(timeout=seconds)


def test_the_job_s(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import mlxdist; print(mlxdist.init().timeout)")
    assert run_ranks(program, 2, environment={"MLXDIST_TIMEOUT": "7.5"}) == ["7.5\n"] * 2
