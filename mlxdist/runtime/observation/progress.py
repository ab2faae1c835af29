"""Whether a job goes on: for `mlxdist launch --stall-timeout` and `mlxdist watch`."""

from collections.abc import Mapping

from ..diagnostics.flight_records import FlightRecord

__all__ = ["Progress"]


class Progress:
    """Counts for how long no rank of a job has gone on: begun or ended an operation, moved a byte, or come to another
    step.

    Args:
        now: the time, in seconds, from which on is counted where no rank has responded yet.
    """

    def __init__(self, now: float) -> None:
        self._at: dict[int, tuple] = {}
        self._since = now

    def update(self, records: Mapping[int, FlightRecord], now: float) -> float:
        """The seconds without progress.

        Args:
            records: those of the ranks that have responded; of the others the last ones count.
            now: the time, in seconds.
        """
        before, self._at = self._at, self._at | {rank: _position(record) for rank, record in records.items()}
        if self._at != before:
            self._since = now
        return now - self._since

    def excuse(self, now: float) -> None:
        """Counts from now on: it could not be seen whether there was progress."""
        self._since = now


def _position(record: FlightRecord) -> tuple:
    latest = max((operation.number for operation in record.operations), default=0)
    in_progress = sum(operation.ended_ns is None for operation in record.operations)
    return record.pid, record.step, latest, in_progress, record.bytes_sent, record.bytes_received
