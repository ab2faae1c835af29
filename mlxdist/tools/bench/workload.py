"""`BenchmarkWorkload`, the base of the classes that the ranks of a benchmark measure with, and its helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist

from .bandwidth import impossible
from .limits import LIMITS
from .timing import Work, copy_work, interleave, limit_works, quantiles, slowest

__all__ = ["OURS", "BenchmarkWorkload", "evaluated", "peak_memory", "total"]

OURS = "mlxdist"


class BenchmarkWorkload:
    """Measures cases; all ranks make one, with the group and the parameters of the run.

    A call with a case gives its results, on all ranks alike: those of `time`, and ``{"variant", "absent"}`` for a
    variant that cannot do the case.

    Attributes:
        blocks: arguments of `timing.interleave`, besides the repeats that the user has chosen.
        summary: entries that go into the summary of the run.
    """

    blocks: Mapping[str, int] = {}

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.parameters = world, parameters
        self.summary: dict[str, Any] = {}

    def __call__(self, case: dict[str, Any]) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def close(self) -> None:
        """Runs after the last case."""

    def time(
        self,
        case: dict[str, Any],
        works: Mapping[str, Work],
        *,
        moved: int = 0,
        copied: int = 0,
        means: bool = False,
        more: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """The result of each of the ``works``, as the slowest rank saw it; see results.py.

        Args:
            moved: bytes that move between the ranks; both limits of the machine for as many are taken in turn.
            copied: bytes whose copy is the only limit taken, for works that compute; see `Work.copies`.
            means: whether a block counts as one sample, its mean: for calls that leave work behind for the next one.
            more: further entries for the results, by variant.
        """
        world = self.world
        limits = limit_works(moved, world) if moved else {"memcpy": copy_work(copied)} if copied else {}
        times = {}
        blocks: dict[str, Any] = {"repeats": self.parameters.get("repeats"), **self.blocks}
        for name, samples in interleave({**works, **limits}, world, **blocks).items():
            times[name] = quantiles(slowest(samples.mean(axis=1) if means else samples, world))
        allowed = {name: times.pop(name, None) for name in (LIMITS if moved else limits)}
        copy = allowed.get("memcpy")
        results = []
        for name, work in works.items():
            wrong = total(work.wrong() if callable(work.wrong) else work.wrong, world)
            why = f"{wrong} elements of all ranks and calls together are wrong" if wrong else None
            if work.copies and copy:
                why = why or impossible(times[name]["median"], copy["min"] * work.copies)
            # Numbers that cannot be must not be found in a file.
            found = {"wrong": wrong, "refused": why, "microseconds": None if why else times[name]}
            results.append({"case": case, "variant": name} | found | allowed | dict((more or {}).get(name, {})))
        return results


def evaluated(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that makes the call, and evaluates its result."""
    return lambda: mx.eval(call())


def peak_memory(world: mlxdist.Group, call: Callable[[], Any]) -> int:
    """Bytes that a call needs beyond those in use before it, on the rank that needs most. Collective."""
    mx.clear_cache()
    world.barrier()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return int(mlxdist.all_max(np.array([mx.get_peak_memory() - held]), group=world)[0])


def total(number: int, world: mlxdist.Group) -> int:
    """The sum of all ranks' numbers. Collective."""
    return int(mlxdist.all_sum(np.array([number], np.int64), group=world)[0])
