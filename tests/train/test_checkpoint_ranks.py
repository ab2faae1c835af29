"""train.Checkpoints of several ranks: of models that are sharded, on disks that all see or of their own."""

import os
import re
import socket
import subprocess
import sys

import pytest
from launching import LAUNCH, RANK_SCRIPTS
from small_disk import small_disk

SCRIPT = "checkpoints.py"


@pytest.mark.long
def test_a_model_that_is_sharded(run_ranks, tmp_path):
    """And it is loaded by one rank."""
    assert run_ranks(SCRIPT, 2, tmp_path, "comes_back") == ["done\n"] * 2
    assert run_ranks(SCRIPT, 1, tmp_path, "on_other_ranks") == ["done\n"]


@pytest.mark.long
def test_two_ranks_save_and_four_load(run_ranks, tmp_path):
    assert run_ranks(SCRIPT, 2, tmp_path, "comes_back") == ["done\n"] * 2
    assert run_ranks(SCRIPT, 4, tmp_path, "on_other_ranks") == ["done\n"] * 4


@pytest.mark.long
def test_from_fully_shard_to_tensor_parallelism(run_ranks, tmp_path):
    run_ranks(SCRIPT, 2, tmp_path, "saves_fully_sharded")
    assert run_ranks(SCRIPT, 2, tmp_path, "on_other_ranks") == ["done\n"] * 2


@pytest.mark.long
def test_from_fully_shard_to_other_ranks_and_back(run_ranks, tmp_path):
    run_ranks(SCRIPT, 2, tmp_path / "flat", "saves_fully_sharded")
    for ranks in (4, 3, 1):
        assert run_ranks(SCRIPT, ranks, tmp_path / "flat", "loads_fully_sharded") == ["done\n"] * ranks
    run_ranks(SCRIPT, 2, tmp_path / "tensor", "comes_back")
    assert run_ranks(SCRIPT, 3, tmp_path / "tensor", "loads_fully_sharded") == ["done\n"] * 3


@pytest.mark.long
@pytest.mark.parametrize("ranks, others", [(2, (4, 3)), (4, (3, 2)), (3, (1, 2, 4))])
def test_flat_shards_on_other_ranks(run_ranks, tmp_path, ranks, others):
    run_ranks(SCRIPT, ranks, tmp_path, "saves_flat")
    for loading in others:
        assert run_ranks(SCRIPT, loading, tmp_path, "loads_flat") == ["done\n"] * loading


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_hosts_with_disks_of_their_own(run_ranks, tmp_path, ranks):
    assert run_ranks(SCRIPT, ranks, tmp_path, "disks_of_their_own") == ["done\n"] * ranks


def test_failures_of_one_rank(run_ranks, tmp_path):
    names = ["failures", "a_disk_is_full", "a_flipped_bit", "training_goes_on"]
    for output in run_ranks(SCRIPT, 2, tmp_path, *names):
        assert output.endswith("done\n")


def test_too_little_room(tmp_path):
    """And a training goes on past one save that does not fit."""
    with small_disk(tmp_path, "size=1m,nr_inodes=12") as prefix:
        names = ["too_little_room", "a_training_goes_on"]
        command = [*prefix, *LAUNCH, "-n", "2", "--", sys.executable, RANK_SCRIPTS / SCRIPT, tmp_path, *names]
        job = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert job.returncode == 0 and job.stdout.count("done") == 2, job.stderr
    assert job.stderr.count("the training goes on, and ends if the next save fails, too: Checkpoints.save: step") == 2


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_mesh(run_ranks, tmp_path, ranks):
    assert run_ranks(SCRIPT, ranks, tmp_path, "mesh") == ["done\n"] * ranks


@pytest.mark.long
def test_a_rank_that_dies(run_ranks, tmp_path):
    output = run_ranks(SCRIPT, 2, tmp_path, "one_rank_dies", status=None)[0]
    assert re.search("rank 1", output), output
    assert not list(tmp_path.glob("dead/*/manifest.json"))


def test_ranks_without_a_launcher_are_one_run(tmp_path):
    """Each of their processes has another name, and that of rank 0 counts."""
    program = (
        "import sys, mlx.core as mx; from mlxdist.train import Checkpoints\n"
        "with Checkpoints(sys.argv[1]) as checkpoints: checkpoints.save(5, {'w': mx.ones(1)})\n"
        "print(Checkpoints(sys.argv[1]).load({'w': mx.ones(1)}))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = {"MLXDIST_WORLD_SIZE": "2", "MLXDIST_RENDEZVOUS": address, "MLXDIST_SECRET": "ab" * 16}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env=os.environ | job | {"MLXDIST_RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == [b"5\n"] * 2


def test_a_failed_collective_is_no_error_of_saving(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, mlx.core as mx, mlxdist\n"
        "from mlxdist.train import Checkpoints\n"
        "operation = mlxdist.all_max if mlxdist.init().rank() else mlxdist.all_sum\n"
        "try: Checkpoints(sys.argv[1]).save(1, {'w': operation(mx.ones(2))})\n"
        "except mlxdist.Error as error: print(type(error).__name__)\n"
    )
    assert run_ranks(program, 2, tmp_path) == ["Mismatch\n"] * 2
    assert not list(tmp_path.glob("step-*"))
