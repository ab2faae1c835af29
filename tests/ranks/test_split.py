"""Group.split: groups of some of the ranks, that work side by side on the same queue pairs."""

import re

import numpy as np
import pytest

import mlxdist

SCENARIOS = ["grid", "grid_of_mlx", "colors", "split_of_a_split", "during_lazy_operations", "many"]
OWN_RANKS = {"resident": False}  # for what ends the world, or looks at the end of the program


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_four_ranks(run_scenarios, scenario):
    run_scenarios("split.py", 4, scenario)


def test_all_end_with_the_world(run_scenarios):
    run_scenarios("split.py", 4, "end_with_the_world", **OWN_RANKS)


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["colors", "split_of_a_split", "registered", "counted", "threads"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_on_few_ranks(run_scenarios, scenario, ranks):
    run_scenarios("split.py", ranks, scenario, **(OWN_RANKS if scenario == "registered" else {}))


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["grid", "grid_of_mlx", "split_of_a_split", "threads", "end_with_the_world"])
def test_connections_made_on_first_use(run_scenarios, scenario):
    """Messages of the rendezvous make them while the ranks wait, also where MLX holds the interpreter's lock."""
    run_scenarios("split.py", 4, scenario, environment={"MLXDIST_ON_DEMAND_THRESHOLD": "1"})


@pytest.mark.parametrize("kind", ["blocking", pytest.param("lazy", marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_opposite_order_on_two_groups_is_an_error_that_names_both_operations(run_ranks, kind, ranks):
    """It would be a deadlock."""
    for rank, output in enumerate(run_ranks("split.py", ranks, f"opposite_{kind}", status=1, timeout=20)):
        error = re.search(r"^(\w+) after ([0-9.]+) s: (.*)$", output, re.MULTILINE)
        assert error, f"rank {rank} reported no error:\n{output}"
        assert error[1] == "Mismatch" and float(error[2]) < 5, error[0]
        assert "all_sum of float32 [3]" in error[3] and "all_gather of float32 [5]" in error[3], error[0]


@pytest.mark.parametrize("kind", ["mlxdist", "mx"])
def test_an_error_that_was_caught_is_not_printed_again(run_scenarios, kind):
    """It was, at the end of the program, and the exit status was 1."""
    run_scenarios("split.py", 2, "caught_error", kind, **OWN_RANKS)


def test_in_a_group_of_one():
    group = mlxdist.init()
    part = group.split(3)
    assert (part.rank(), part.size()) == (0, 1) and part is not group
    assert np.array_equal(mlxdist.all_sum(np.arange(3), group=part), np.arange(3))
    assert part.mlx.size() == 1 and set(part.stats().values()) == {0}
    part.barrier()
    assert group.split(-1) is None
    with pytest.raises(mlxdist.InvalidArgument, match="made by split.* ends by itself"):
        part.finalize()
    group.finalize()
    with pytest.raises(mlxdist.InvalidArgument, match="has been finalized"):
        mlxdist.all_sum(np.arange(3), group=part)


@pytest.mark.parametrize("arguments, name", [((2**31,), "color"), ((0, -(2**31) - 1), "key")])
def test_numbers_that_do_not_fit(arguments, name):
    with pytest.raises(mlxdist.InvalidArgument, match=f"split: {name} is .* more than 32 bits"):
        mlxdist.init().split(*arguments)
