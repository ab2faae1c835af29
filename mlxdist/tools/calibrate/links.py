"""Measures the speed of the link from one rank to another, for `mlxdist calibrate` and `mlxdist doctor`."""

import time

import numpy as np

import mlxdist

from ..bench.timing import quantiles

__all__ = ["MESSAGE_BYTES", "measure_link"]

MESSAGE_BYTES = 4 << 20
_MESSAGES = 4  # in a block, at most


def measure_link(
    world: mlxdist.Group, source: int, target: int, seconds: float, blocks: tuple[int, int]
) -> dict[str, float] | None:
    """GB/s of the blocks by the receiver's clock, and the number of wrong elements; None on all other ranks.

    A block of messages begins when the receiver requests it and ends when the last one has arrived, so that nothing is
    in transit when the clock starts. Then the receiver checks every byte.

    Args:
        seconds: the time for all blocks; a block has fewer messages where the link is too slow for all of them.
        blocks: the minimum and maximum number of blocks that count; one before them does not.
    """
    if world.rank() == source:
        _send(world, target)
    return _receive(world, source, seconds, *blocks) if world.rank() == target else None


def _messages(target: int) -> list[np.ndarray]:
    """The messages of a block: all different, and different for each target rank."""
    numbers = np.arange(MESSAGE_BYTES // 4, dtype=np.uint32)
    return [numbers * np.uint32(2 * target + 1) + np.uint32(number) for number in range(_MESSAGES)]


def _send(world: mlxdist.Group, target: int) -> None:
    messages, count = _messages(target), np.zeros(1, np.int32)
    while mlxdist.recv((1,), np.int32, target, group=world, out=count)[0]:
        for message in messages[: count[0]]:
            mlxdist.send(message, target, group=world)


def _receive(world: mlxdist.Group, source: int, seconds: float, least: int, most: int) -> dict[str, float]:
    expected = _messages(world.rank())
    got = [np.empty_like(message) for message in expected]
    clock, wrong, count = time.perf_counter, 0, 1
    rates: list[float] = []
    end = clock() + seconds
    while len(rates) < 1 + least or (clock() < end and len(rates) < most):
        arrays = got[:count]
        # Without this, the content of the previous block would hide a message that did not arrive.
        for array in arrays:
            array.fill(0xFFFFFFFF)
        begin = clock()
        mlxdist.send(np.array([count], np.int32), source, group=world)
        for array in arrays:
            mlxdist.recv_like(array, source, group=world, out=array)
        took = clock() - begin
        rates.append(count * MESSAGE_BYTES / 1e9 / took)
        wrong += sum(int(np.sum(a != b)) for a, b in zip(arrays, expected))
        count = max(1, min(_MESSAGES, int(count * seconds / took)))
    mlxdist.send(np.zeros(1, np.int32), source, group=world)
    return quantiles(np.array(rates[1:])) | {"wrong": wrong}
