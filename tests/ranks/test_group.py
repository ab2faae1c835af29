"""How the world comes together and ends, as far as one process shows it."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

import mlxdist


@pytest.fixture(autouse=True)
def world_of_its_own():
    """The group of one is re-created after finalize(), so every test may end it."""
    yield
    mlxdist.init().finalize()


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def bound(group):
    return {
        "Group": group,
        "Handle": mlxdist.all_sum(np.ones(3), async_op=True),
        "Registration": group.register(np.ones(3)),
        "Mesh": mlxdist.mesh(dp=-1),
    }


@pytest.mark.parametrize("name", ["Group", "Handle", "Registration", "Mesh"])
def test_what_is_bound_to_the_process_is_not_pickled(name):
    with pytest.raises(
        mlxdist.InvalidArgument, match=r"a mlxdist\.\w+ exists in this process alone, and cannot be pic"
    ):
        pickle.dumps(bound(mlxdist.init())[name])


@pytest.mark.parametrize("name", ["Group", "Handle", "Registration"])
def test_its_copies_are_the_object_itself(name):
    made = bound(mlxdist.init())[name]
    assert copy.copy(made) is made and copy.deepcopy([made])[0] is made


def test_finalize_of_the_module():
    mlxdist.finalize()
    group = mlxdist.init()
    mlxdist.finalize()
    mlxdist.finalize()
    with pytest.raises(mlxdist.InvalidArgument, match="has been finalized"):
        group.barrier()
    assert mlxdist.init() is not group


def test_without_a_launcher_there_is_one_rank():
    group = mlxdist.init()
    assert (group.rank(), group.size()) == (0, 1) == (mlxdist.get_rank(), mlxdist.get_world_size())
    assert (group.provider, group.provider_reason) == ("none", "a group of one")
    assert set(group.stats().values()) == {0} and "payload_bytes_sent" in group.stats()
    group.barrier()
    mlxdist.barrier()
    assert repr(group) == "<mlxdist.Group rank 0 of 1>"


def test_mlx_sees_a_real_group_of_one():
    world = mlxdist.init().mlx
    assert isinstance(world, mx.distributed.Group) and (world.rank(), world.size()) == (0, 1)
    x = mx.arange(3.0)
    assert mx.array_equal(mx.distributed.all_sum(x, group=world), x)


def test_algorithm_of_a_group_of_one():
    group = mlxdist.init()
    assert group.algorithm("all_sum", 1000) == group.algorithm("barrier", 0) == "none"
    with pytest.raises(mlxdist.InvalidArgument, match="'all_som' is no operation with a choice; those are all_reduce"):
        group.algorithm("all_som", 1000)


@pytest.mark.parametrize("forced", ["direct", "mesh", "ring", "recursive_doubling", "tree"])
def test_requested_algorithm(run_ranks, forced):
    """It is used wherever an operation has it, and the results stay right."""
    has = {
        "direct": {"all_sum", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce", "gather", "scatter"},
        "mesh": {"all_sum", "broadcast", "reduce"},
        "ring": {"all_sum", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce", "gather", "scatter"},
        "recursive_doubling": {"all_sum", "barrier"},
        "tree": {"all_sum", "broadcast", "reduce"},
    }[forced]
    for output in run_ranks("chosen_algorithms.py", 3, environment={"MLXDIST_ALGO": forced}):
        selected = dict(line.split() for line in output.splitlines())
        assert {name for name, algorithm in selected.items() if algorithm == forced} == has, selected


def test_all_calls_and_threads_get_the_same_group():
    groups = []
    threads = [threading.Thread(target=lambda: groups.append(mlxdist.init())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == 8 and all(group is mlxdist.init() for group in groups)


def test_finalized_group_is_rejected_and_another_one_can_be_made():
    group = mlxdist.init()
    group.finalize()
    group.finalize()
    assert repr(group) == "<mlxdist.Group rank 0 of 1, finalized>"
    with pytest.raises(mlxdist.InvalidArgument, match="has been finalized"):
        mlxdist.all_sum(mx.ones(3), group=group)
    assert mlxdist.init() is not group


def test_strict_needs_a_launcher():
    result = python("import mlxdist; mlxdist.init(strict=True)")
    assert result.returncode == 1
    assert "InvalidArgument: mlxdist.init(strict=True): no launcher started this process" in result.stderr


def test_other_backends_are_rejected():
    with pytest.raises(mlxdist.InvalidArgument, match="no backend 'ring'"):
        mlxdist.init(backend="ring")
    assert mlxdist.is_available() and mlxdist.is_available("mlxdist") and not mlxdist.is_available("ring")


def test_a_broken_environment_never_becomes_a_group_of_one():
    result = python("import mlxdist; print(mlxdist.init())", MLXDIST_WORLD_SIZE="2")
    assert result.returncode == 1 and result.stdout == ""
    assert "MLXDIST_RANK is not" in result.stderr


def test_a_world_smaller_than_launched_is_an_error():
    variables = {
        "MLXDIST_RANK": "0",
        "MLXDIST_WORLD_SIZE": "2",
        "MLXDIST_RENDEZVOUS": "127.0.0.1:38471",
        "MLXDIST_SECRET": "ab" * 16,
        "MLXDIST_RENDEZVOUS_TIMEOUT": "1",
    }
    result = python("import mlxdist; print(mlxdist.init())", **variables)
    assert result.returncode == 1 and result.stdout == ""
    assert "rank 1 of 2 has not connected" in result.stderr


def test_group_that_is_still_open_is_torn_down_at_exit(run_ranks):
    """And an exit handler of the program, registered later, may still use it."""
    for output in run_ranks("exit_handler.py", 2):
        assert output == "sum at exit: 2.0\n"
