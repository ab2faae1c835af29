"""Ranks that mpirun or srun has numbered: by table, and with the real mpirun where there is one."""

import os
import secrets
import shutil
import socket
import subprocess
import sys

import pytest

from mlxdist.base.batch_systems import SchedulerRank, reject_launchers, scheduler_rank
from mlxdist.base.environment import Environment
from mlxdist.base.errors import EnvironmentVariableError, RendezvousError
from mlxdist.runtime import mpi_shim

JOB = {"MLXDIST_RENDEZVOUS": "127.0.0.1:4711", "MLXDIST_SECRET": "ab" * 32}
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    "variables, place",
    [
        ({}, None),
        (OMPI, (1, 4)),
        (OMPI | {"PMIX_RANK": "1"}, (1, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        (STEP, (2, 4)),
        ({"SLURM_STEPID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, (2, 8)),
        (STEP | {"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),
        (STEP | {"PMIX_RANK": "2"}, (2, 4)),
        ({"PMIX_RANK": "2"}, (2, None)),
        # A batch script is task 0, and so is mpirun's daemon on every node.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        (OMPI | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (1, 4)),
    ],
)
def test_scheduler_ranks(variables, place):
    found = scheduler_rank(variables)
    assert (found and (found.rank, found.size)) == place


def test_a_scheduler_rank_names_its_variables():
    assert scheduler_rank(OMPI) == SchedulerRank(1, 4, "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize(
    "variables, words",
    [
        (OMPI | {"PMI_RANK": "2", "PMI_SIZE": "4"}, "OMPI_COMM_WORLD_RANK=1, PMI_RANK=2 contradict each other"),
        (OMPI | {"PMI_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=4, PMI_SIZE=2 contradict each other"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "rank 2 does not fit 2 processes"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "PMI_RANK='-1' is not the number of a process"),
        ({"PMI_RANK": "1_0", "PMI_SIZE": "20"}, "PMI_RANK='1_0'"),
        ({"PMI_RANK": "9" * 99, "PMI_SIZE": "20"}, "PMI_RANK='999"),
        ({"PMIX_RANK": "1"}, "nothing says how many there are; set MLXDIST_WORLD_SIZE"),
        (OMPI | {"MLXDIST_WORLD_SIZE": "2"}, "MLXDIST_WORLD_SIZE=2 contradicts the 4 processes of OMPI_COMM"),
    ],
)
def test_rejected(variables, words):
    with pytest.raises(EnvironmentVariableError, match=words):
        Environment.read(JOB | variables)


def test_what_is_read():
    read = Environment.read(JOB | OMPI)
    assert (read.rank, read.world_size, read.rendezvous) == (1, 4, ("127.0.0.1", 4711))
    read = Environment.read(JOB | {"PMIX_RANK": "1", "MLXDIST_WORLD_SIZE": "2"})
    assert (read.rank, read.world_size) == (1, 2)


def test_our_own_numbers_come_first():
    read = Environment.read(JOB | OMPI | {"MLXDIST_RANK": "0", "MLXDIST_WORLD_SIZE": "2"})
    assert (read.rank, read.world_size) == (0, 2)


def test_without_a_job_they_mean_nothing():
    assert Environment.read(OMPI) == Environment()


NCCL = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "1"}
TORCH = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "variables, words",
    [
        (OMPI, "mpirun has started 4 processes .* -n 4 -- .* MLXDIST_RENDEZVOUS and MLXDIST_SECRET"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"PMIX_RANK": "1"}, "mpirun has started this process .* -n N -- "),
        (STEP, "srun has started 4 processes"),
        (NCCL, "mlx.launch has started 2 processes .MLX_RANK, MLX_WORLD_SIZE.* instead. For a group of one"),
        (TORCH, "torchrun has started 2 processes"),
    ],
)
def test_processes_of_another_launcher_are_no_groups_of_one(variables, words):
    with pytest.raises(RendezvousError, match=words):
        reject_launchers(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
        NCCL | {"MLX_WORLD_SIZE": "1"},
        {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2"},  # of a rank of ours, in a process of its own
        {"MLX_RANK": "0", "MLX_HOSTFILE": os.devnull},  # mlx.launch -n 1
        {"RANK": "0", "WORLD_SIZE": "2"},  # of anything
    ],
)
def test_a_process_alone_is_a_group_of_one(variables):
    reject_launchers(variables)


INIT = "import mlxdist; print(mlxdist.init().size())"


def init(*command, **variables):
    command = [*command, sys.executable, "-c", INIT]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("variable", ["MLX_HOSTFILE", "MLX_IBV_DEVICES"])
def test_init_under_mlx_launch(tmp_path, variable):
    """With the variables and the file that mlx.launch gives its ranks; it prints 1 without this check."""
    file = tmp_path / "ranks.json"
    file.write_text('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]')
    job = init(MLX_RANK="0", **{variable: str(file)})
    assert job.returncode == 1 and "mlx.launch has started 2 processes" in job.stderr, job.stderr


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpirun", "mlx.launch"])
def test_init_under_the_real_launcher(launcher):
    words = {"mpirun": ["mpirun", "--host", "localhost:2"], "mlx.launch": ["mlx.launch", "-n", "2", "--"]}[launcher]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    if not shutil.which(words[0], path=path):
        pytest.skip(f"no {launcher} here")
    job = init(*words, PATH=path, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    assert f"{launcher} has started 2 processes" in job.stdout + job.stderr, job


PROGRAMS = {
    "mlxdist": "import mlxdist as d, numpy as np; assert d.init().size() == 2 and d.all_sum(np.ones(1)).item() == 2",
    "plain MLX": "import mlx.core as mx; d = mx.distributed; assert d.init().size() == 2 and d.all_sum(1).item() == 2",
}


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_under_mpirun(program):
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun here")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    variables = {
        "MLXDIST_RENDEZVOUS": address,
        "MLXDIST_SECRET": secrets.token_hex(32),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **(mpi_shim.variables() if program == "plain MLX" else {}),
    }
    command = ["mpirun", "--host", "localhost:2", sys.executable, "-c", PROGRAMS[program]]
    job = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
