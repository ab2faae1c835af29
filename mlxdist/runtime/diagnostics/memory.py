"""Memory of this rank and of its machine, for `mlxdist top`."""

from dataclasses import dataclass

from mlxdist.base.validation import checked, number, or_null
from mlxdist.cluster.facts.memory import process_memory, total_memory

__all__ = ["RankMemory", "read_memory"]

_BYTES = number(0, 2**63)


@dataclass(frozen=True)
class RankMemory:
    """Memory in bytes; None where the system does not report it."""

    active: int = checked(_BYTES)  # mx.get_active_memory()
    peak: int = checked(_BYTES)  # mx.get_peak_memory()
    resident: int | None = checked(or_null(_BYTES))  # of the process, as is the next; see ProcessMemory
    private: int | None = checked(or_null(_BYTES))
    total: int | None = checked(or_null(_BYTES))  # of the machine, or of the container or SLURM job

    @property
    def used(self) -> int | None:
        """The larger of resident and private: that of a Mac lacks what is compressed, or mapped by its GPU alone."""
        return max((size for size in (self.resident, self.private) if size is not None), default=None)

    @property
    def share(self) -> float | None:
        """The part of the machine's memory that the process takes."""
        return None if self.used is None or not self.total else self.used / self.total


def read_memory() -> RankMemory:
    """The memory of this process now, in some 0.1 ms."""
    import mlx.core as mx  # observers read records without MLX

    process = process_memory()
    return RankMemory(mx.get_active_memory(), mx.get_peak_memory(), process.resident, process.private, total_memory())
