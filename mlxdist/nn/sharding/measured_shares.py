"""``rank_shares="memory"`` and "compute": the speeds of the ranks, as `mlxdist calibrate` has measured them.

`mlxdist launch` hands them to the ranks of a hostfile whose hosts are all measured. "memory" is for decoding, where
reading the weights is what takes time; "compute" for prompts and training.
"""

from collections.abc import Sequence

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.rank_shares import MEASUREMENTS

__all__ = ["RankShares", "resolve", "slowest_of_columns"]

RankShares = Sequence[float] | str


def resolve(name: str, rank_shares: RankShares | None, ranks: int, rows: int = 1) -> Sequence[float] | None:
    """Numbers where ``rank_shares`` is a word, one for each of ``ranks``, which are the columns of a grid of ``rows``;
    anything else as it is. Raises InvalidArgument, which begins with ``name``: no such word; this job has no measured
    hosts, or another number of ranks."""
    if not isinstance(rank_shares, str):
        return rank_shares
    if rank_shares not in MEASUREMENTS:
        words = " or ".join(f'"{word}"' for word in MEASUREMENTS)
        raise InvalidArgument(
            f"{name}: rank_shares must be {ranks} numbers, one per rank, or {words}, not {rank_shares!r:.80}"
        )
    found = getattr(Environment.read(), f"rank_shares_{rank_shares}")
    if found is None:
        raise InvalidArgument(
            f"{name}: rank_shares={rank_shares!r} needs a job whose hosts are measured: `mlxdist calibrate` writes its "
            "measurements to the hostfile of `mlxdist launch --hostfile`"
        )
    if len(found) != ranks * rows:
        raise InvalidArgument(
            f"{name}: rank_shares={rank_shares!r} are those of the {len(found)} ranks of the job, but "
            f"{ranks * rows} share the work here; give numbers"
        )
    return slowest_of_columns(found, ranks)


def slowest_of_columns(speeds: Sequence[float], columns: int) -> list[float]:
    """Of the ranks in a grid, rank = row * columns + column: each column is as fast as its slowest."""
    return [min(speeds[column::columns]) for column in range(columns)]
