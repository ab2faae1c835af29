"""Finds a process's rank in the variables of its launcher: Open MPI, a PMI (MPICH, Intel MPI), PMIx, or SLURM.

Where one of these, or mlx.launch or torchrun, has started several processes and no job of mlxdist is named, each of
them would be a group of one; ``reject_launchers`` raises instead.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import EnvironmentVariableError, RendezvousError
from .json_reader import parse_json

__all__ = ["SchedulerRank", "scheduler_rank", "reject_launchers"]

_MAX_PROCESSES = 1 << 20
# Variables of rank and size. PMIx has none for the size; Open MPI and srun, which use PMIx, have one of their own.
_STARTERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", ""))
# Launchers that number their ranks by variables that `scheduler_rank` does not read.
_OWN_RANKS = ("mlx.launch", "torchrun")
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class SchedulerRank(NamedTuple):
    """A rank from a scheduler. ``size``: None where no variable gives it. ``source``: the variables read."""

    rank: int
    size: int | None
    source: str


def scheduler_rank(environ: Mapping[str, str]) -> SchedulerRank | None:
    """The rank that a scheduler has given this process; None without one.

    SLURM's numbers count where there are no others, and in a step (srun) only: a batch script is its task 0, and what
    `mpirun` starts from there inherits that.

    Raises:
        EnvironmentVariableError: a number is malformed, or two sources contradict each other.
    """
    ranks = {name: _number(environ, name) for name, _ in _STARTERS if name in environ}
    sizes = {name: _number(environ, name) for _, name in _STARTERS if name in environ}
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    if in_step and not ranks and "SLURM_PROCID" in environ:
        ranks["SLURM_PROCID"] = _number(environ, "SLURM_PROCID")
    if in_step and not sizes:
        sizes = {name: _number(environ, name) for name in _SLURM_SIZES if name in environ}
        sizes = dict(list(sizes.items())[:1])  # the step's own comes first; the other may be the allocation's
    rank, size = _agreed(ranks), _agreed(sizes)
    if rank is None:
        return None
    source = ", ".join([*ranks, *sizes])
    if size is not None and rank >= size:
        raise EnvironmentVariableError(f"{source}: rank {rank} does not fit {size} processes")
    return SchedulerRank(rank, size, source)


def reject_launchers(environ: Mapping[str, str]) -> None:
    """Checks that no other launcher has started this process, which belongs to no job of mlxdist.

    Raises:
        RendezvousError: another launcher has started it as one of several.
        EnvironmentVariableError: a variable of a scheduler is malformed, as in `scheduler_rank`.
    """
    launcher, size, source = _launcher(environ)
    if size == 1:
        return
    keep = "; or keep it, with MLXDIST_RENDEZVOUS and MLXDIST_SECRET for all (docs/environment.md)"
    raise RendezvousError(
        f"mlxdist.init(): {launcher} has started {'this process' if size is None else f'{size} processes'} ({source}), "
        "which nothing joins to a group of mlxdist; start the program with "
        f"`mlxdist launch -n {size or 'N'} -- python program.py` instead{'' if launcher in _OWN_RANKS else keep}. "
        "For a group of one in each process set MLXDIST_RANK=0 and MLXDIST_WORLD_SIZE=1"
    )


def _launcher(environ: Mapping[str, str]) -> tuple[str, int | None, str]:
    """The launcher's name, how many processes it has started (None if unknown), and the variables that say so."""
    found = scheduler_rank(environ)
    if found is not None and found.size != 1:
        return "srun" if found.source.startswith("SLURM") else "mpirun", found.size, found.source
    if "MLX_RANK" in environ:
        for name in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):
            if name in environ:
                return "mlx.launch", _entries(environ[name]), f"MLX_RANK, {name}"
        if "NCCL_HOST_IP" in environ and "MLX_WORLD_SIZE" in environ:
            return "mlx.launch", _number(environ, "MLX_WORLD_SIZE"), "MLX_RANK, MLX_WORLD_SIZE"
    if "TORCHELASTIC_RUN_ID" in environ and "WORLD_SIZE" in environ:
        return "torchrun", _number(environ, "WORLD_SIZE"), "TORCHELASTIC_RUN_ID, WORLD_SIZE"
    return "", 1, ""


def _entries(file: str) -> int:
    """The number of ranks that a file of mlx.launch lists. The file is empty for one rank."""
    try:
        listed = parse_json(Path(file).read_bytes() or b"[]")
    except (OSError, ValueError):
        return 1  # no ranks of MLX, either
    return max(1, len(listed)) if isinstance(listed, list) else 1


def _agreed(numbers: Mapping[str, int]) -> int | None:
    if len(set(numbers.values())) > 1:
        listed = ", ".join(f"{name}={number}" for name, number in numbers.items())
        raise EnvironmentVariableError(
            f"{listed} contradict each other: one launcher runs inside another; unset those that do not belong to this "
            "job, or set MLXDIST_RANK and MLXDIST_WORLD_SIZE"
        )
    return next(iter(numbers.values()), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MAX_PROCESSES):
        raise EnvironmentVariableError(f"{name}={text!r:.80} is not the number of a process")
    return int(text)
