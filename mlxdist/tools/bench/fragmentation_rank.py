"""What each rank of `mlxdist bench fragmentation` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mlxdist

from .job import serve
from .limits import times_limits
from .limits_rank import limit_works, take_limits
from .operations import Inputs, add, count_wrong, total_wrong
from .timing import Work, interleave, quantiles, slowest

DTYPE = "float32"


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: bytes, pieces, rounds."""
    wholes = Inputs(DTYPE, parameters["bytes"] // 4, world.size())
    for operation, (prepare, expected) in OPERATIONS.items():
        x, out = wholes[world.rank()], np.zeros(wholes.elements, np.float32)
        works = {
            str(pieces): Work(prepare(world, np.array_split(x, pieces), np.array_split(out, pieces)))
            for pieces in (1, parameters["pieces"])
        }
        wrong, counters = {}, {}
        for pieces, work in works.items():
            out.fill(np.nan)
            before = world.stats()
            work.call()
            after = world.stats()
            counters[pieces] = {name: after[name] - before[name] for name in after}
            wrong[pieces] = count_wrong(out, expected(wholes, world.rank()))
        taken = interleave(works | limit_works(x.nbytes, world), parameters["rounds"], world)
        times = {name: quantiles(slowest(samples, world)) for name, samples in taken.items()}
        limits = take_limits(times)
        for pieces in works:
            wrong_later = count_wrong(out, expected(wholes, world.rank()))
            yield {
                "operation": operation,
                "bytes": x.nbytes,
                "pieces": int(pieces),
                "microseconds": times[pieces],
                **limits,
                **times_limits(times[pieces]["median"], limits),
                "counters": counters[pieces],
                "wrong": total_wrong(wrong[pieces] + wrong_later, world),
            }


def _stream(world: mlxdist.Group, given: list[np.ndarray], received: list[np.ndarray]) -> Callable[[], None]:
    """Rank 0 sends all pieces to rank 1, which answers when it has the last."""
    answer = np.zeros(1, np.float32)

    def sender() -> None:
        for piece in given:
            mlxdist.send(piece, 1, group=world)
        mlxdist.recv_like(answer, 1, group=world, out=answer)

    def receiver() -> None:
        for piece in received:
            mlxdist.recv_like(piece, 0, group=world, out=piece)
        mlxdist.send(answer, 0, group=world)

    return {0: sender, 1: receiver}.get(world.rank(), lambda: None)


def _sums(world: mlxdist.Group, given: list[np.ndarray], received: list[np.ndarray]) -> Callable[[], None]:
    def sums() -> None:
        for piece, out in zip(given, received):
            mlxdist.all_sum(piece, group=world, out=out)

    return sums


def _received(wholes: Inputs, rank: int) -> np.ndarray:
    """What `_stream` leaves: ranks that take no part keep what the array was filled with."""
    return wholes[0] if rank == 1 else np.full(wholes.elements, np.nan, np.float32)


# Name: what makes the call, and what is in the output after it.
OPERATIONS = {"send_recv": (_stream, _received), "all_sum": (_sums, lambda wholes, rank: add(wholes))}


if __name__ == "__main__":
    serve(measure)
