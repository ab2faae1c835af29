"""``rank_shares="memory"`` and "compute": the speeds of the ranks, as `mlxdist calibrate` has measured them.

`mlxdist launch` hands them to the ranks of a hostfile whose hosts are all measured. "memory" is for decoding, where
reading the weights is what takes time; "compute" for prompts and training.
"""

from collections.abc import Sequence

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.rank_shares import MEASUREMENTS

__all__ = ["RankShares", "resolve", "resolve_stages", "slowest_of_columns"]

RankShares = Sequence[float] | str


def resolve(name: str, rank_shares: RankShares | None, ranks: int, rows: int = 1) -> Sequence[float] | None:
    """Numbers where ``rank_shares`` is a word, one for each of ``ranks``, which are the columns of a grid of ``rows``;
    anything else as it is. Raises InvalidArgument, which begins with ``name``: no such word; this job has no measured
    hosts, or another number of ranks."""
    if not isinstance(rank_shares, str):
        return rank_shares
    found = _measured(f"{name}: rank_shares", rank_shares, f"{ranks} numbers, one per rank")
    if len(found) != ranks * rows:
        raise InvalidArgument(
            f"{name}: rank_shares={rank_shares!r} are those of the {len(found)} ranks of the job, but "
            f"{ranks * rows} share the work here; give numbers"
        )
    return slowest_of_columns(found, ranks)


def resolve_stages(name: str, rank_shares: RankShares | None, stages: int) -> Sequence[float] | None:
    """Resolves ``rank_shares`` as :func:`resolve` does, for the rows of a grid, which are stages of a pipeline: a
    stage is as fast as its slowest rank."""
    if not isinstance(rank_shares, str):
        return rank_shares
    found = _measured(f"{name}: rank_shares", rank_shares, f"{stages} numbers, one per stage")
    if len(found) % stages:
        raise InvalidArgument(
            f"{name}: rank_shares={rank_shares!r} are those of the {len(found)} ranks of the job, which are not "
            f"{stages} equal stages; give numbers"
        )
    columns = len(found) // stages
    return [min(found[row * columns : (row + 1) * columns]) for row in range(stages)]


def slowest_of_columns(speeds: Sequence[float], columns: int) -> list[float]:
    """The speed of each column of ranks in a grid, rank = row * columns + column: that of its slowest rank."""
    return [min(speeds[column::columns]) for column in range(columns)]


def _measured(what: str, word: str, numbers: str) -> Sequence[float]:
    """The speeds of all ranks of the job by that word."""
    if word not in MEASUREMENTS:
        words = " or ".join(f'"{name}"' for name in MEASUREMENTS)
        raise InvalidArgument(f"{what} must be {numbers}, or {words}, not {word!r:.80}")
    found: Sequence[float] | None = getattr(Environment.read(), f"rank_shares_{word}")
    if found is None:
        raise InvalidArgument(
            f"{what}={word!r} needs a job whose hosts are measured: `mlxdist calibrate` writes its measurements to the "
            "hostfile of `mlxdist launch --hostfile`"
        )
    return found
