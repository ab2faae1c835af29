"""What a message takes in the virtual machine: instructions, work requests and packets, counted by a plugin of qemu.

Every number is the difference between a run and one of twice the length, so that what happens once is not in it.
Polling is not in it either: of the kernel's instructions those are left out that sched_yield runs, too, for both
programs; of the program's, what ran more than a few times for each message. Interrupts of timers are in neither.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from engine import compile_plugin

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts" / "rxe"))
from machine import HERE, Machine

REPEATS = 3
YIELDS = 50_000
POLLING = 4  # blocks of instructions that run more often for each message belong to a loop
RARE = 0.5  # and those that run less often to something else than messages, such as timer interrupts
KERNEL = 1 << 63  # addresses from here on
PACKETS = "cat /sys/class/infiniband/rxe?/ports/1/hw_counters/sent_pkts"
YIELD = f"{sys.executable} -c 'import os\nfor i in range({{count}}): os.sched_yield()'"


@dataclass(frozen=True)
class Work:
    """Of one message, both sides together."""

    kernel: float  # instructions
    program: float  # instructions; loops, such as copies, are left out as polling is
    work_requests: float  # sends posted, each by a system call
    packets: float


class Point(NamedTuple):
    """What has been counted so far."""

    blocks: np.ndarray  # of instructions: address, length, runs of either processor
    packets: int


class Counter:
    """Counts in a machine that was started with the plugin: ``Machine(plugin=counter.option)``."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "counts"
        self.option = f"{compile_plugin(HERE / 'count.c', directory)},counts={self._file}"

    def start(self, machine: Machine) -> None:
        """Finds what is counted apart, in the machine that has booted."""
        self._machine = machine
        symbols = (line.split()[:3] for line in self._checked("cat /proc/kallsyms").splitlines())
        self._post_send = next(int(address, 16) for address, _, name in symbols if name == "ib_uverbs_post_send")
        keys, runs, _ = self._runs(lambda count: self._checked(YIELD.format(count=count)), YIELDS, YIELDS)
        self._polling = keys[runs > RARE, 0]

    def work(self, run: Callable[[int], object], count: int, messages: int) -> Work:
        """Of one of the ``messages`` that ``run(count)`` sends, and half of what ``run(2 * count)`` does."""
        run(count)  # what it needs is in memory from now on
        each = [self._once(run, count, messages) for _ in range(REPEATS)]
        return Work(**{one.name: statistics.median(getattr(work, one.name) for work in each) for one in fields(Work)})

    def _once(self, run: Callable[[int], object], count: int, messages: int) -> Work:
        keys, runs, packets = self._runs(run, count, messages)
        address, instructions = keys[:, 0], keys[:, 1]
        in_kernel = address >= KERNEL
        done = np.where(runs > RARE, runs * instructions, 0)
        return Work(
            kernel=float(done[in_kernel & ~np.isin(address, self._polling)].sum()),
            program=float(done[~in_kernel & (runs <= POLLING)].sum()),
            work_requests=float(runs[address == self._post_send].sum()),
            packets=packets,
        )

    def _runs(self, run: Callable[[int], object], count: int, messages: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Address and instructions of each block, how often it ran for each message, and packets of a message."""
        start = self._point()
        run(count)
        middle = self._point()
        run(2 * count)
        end = self._point()
        keys, runs = _merged(_between(middle, end), _between(start, middle), messages)
        return keys, runs, (end.packets - 2 * middle.packets + start.packets) / messages

    def _checked(self, command: str) -> str:
        result = self._machine.run(command, 60)
        if result.status:
            raise click.ClickException(f"{command!r} ended with status {result.status}: {result.output}")
        return result.output

    def _point(self) -> Point:
        packets = sum(map(int, self._checked(PACKETS).split()))
        rows = np.fromfile(self._file, np.uint64).reshape(-1, 4)
        return Point(rows[1 : 1 + int(rows[0, 0])], packets)


def _between(before: Point, after: Point) -> np.ndarray:
    """Address, instructions and runs of each block that ran in between."""
    rows = after.blocks.copy()
    rows[: len(before.blocks), 2:] -= before.blocks[:, 2:]
    runs = rows[:, 2] + rows[:, 3]
    return np.column_stack((rows[:, :2], runs))[runs > 0]


def _merged(longer: np.ndarray, shorter: np.ndarray, messages: int) -> tuple[np.ndarray, np.ndarray]:
    """Address and instructions of each block, and how often it ran for each message."""
    keys, index = np.unique(np.concatenate((longer[:, :2], shorter[:, :2])), axis=0, return_inverse=True)
    signed = np.concatenate((longer[:, 2].astype(float), -shorter[:, 2].astype(float)))
    return keys, np.bincount(index.reshape(-1), signed, len(keys)) / messages
