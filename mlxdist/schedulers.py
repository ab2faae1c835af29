"""Which rank a process is by the word of whoever started it: Open MPI, a PMI (MPICH, Intel MPI), PMIx, or SLURM."""

from collections.abc import Mapping
from typing import NamedTuple

from .errors import EnvironmentVariableError

__all__ = ["Place", "find_place"]

_LARGEST = 1 << 20
# Rank, size. PMIx has no variable for the size; those who use it, Open MPI and srun, have one of their own.
_STARTERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", ""),
)
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class Place(NamedTuple):
    """``size``: None where nobody says it. ``source``: the variables that say so."""

    rank: int
    size: int | None
    source: str


def find_place(environ: Mapping[str, str]) -> Place | None:
    """None: nobody has numbered this process.

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
    if not ranks:
        return None
    if in_step and not sizes:
        sizes = {name: _number(environ, name) for name in _SLURM_SIZES if name in environ}
        sizes = dict(list(sizes.items())[:1])  # the step's own comes first; the other may be the allocation's
    rank, size = _agreed(ranks), _agreed(sizes)
    source = ", ".join([*ranks, *sizes])
    if size is not None and rank >= size:
        raise EnvironmentVariableError(f"{source}: rank {rank} does not fit {size} processes")
    return Place(rank, size, source)


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
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _LARGEST):
        raise EnvironmentVariableError(f"{name}={text!r:.80} is not the number of a process")
    return int(text)
