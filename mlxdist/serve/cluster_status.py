"""Rank 0's part of the cluster view: who holds what, memory, counts of requests, the flight records of all ranks."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxdist.runtime.diagnostics.flight_records import rank_directory
from mlxdist.runtime.rendezvous.observer import observe

from .memory import UNLIMITED
from .metrics import Metrics
from .placement import Holding

__all__ = ["ClusterStatus"]

_SECONDS = 1.0  # that the ranks may take to send a record


@dataclass(frozen=True)
class ClusterStatus:
    """Rank 0's description of all ranks, in the words of :class:`~mlxdist.serve.protocol.Status`.

    Attributes:
        model: the name of the model.
        layout: the name of the placement.
        holdings: what each rank holds.
        limits: bytes that MLX is to use on each rank.
        metrics: rank 0's counters.
        gauges: the values of gauges now.
    """

    model: str
    layout: str
    holdings: Sequence[Holding]
    limits: Sequence[float]
    metrics: Metrics
    gauges: Callable[[], dict[str, float]]

    async def read(self) -> dict[str, Any]:
        """Reads the status. The records come as `mlxdist top` gets them: by rank 0's rendezvous, as an observer.

        Each rank writes one in the thread of its heartbeats; no rank waits, and no collective is involved.
        """
        counts = self.metrics.counts(self.gauges())
        held = [asdict(holding) for holding in self.holdings]
        for row, limit in zip(held, self.limits):
            row |= {"memory": self.metrics.active_memory(row["rank"]), "limit": limit if limit < UNLIMITED else None}
        found: dict[str, Any] = {"requests": counts, "observation": None, "held": held}
        found |= {"model": self.model, "layout": self.layout}
        directory = rank_directory(0)
        observation = await asyncio.to_thread(observe, directory, _SECONDS) if directory is not None else None
        if observation is not None:
            found["observation"] = {
                "records": list(observation.records.values()),
                "members": [asdict(member) for member in observation.members.values()],
                "notes": observation.notes(_SECONDS),
            }
        return found
