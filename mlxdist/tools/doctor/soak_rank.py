"""A rank of the doctor's soak: moves data for some time, and compares all that arrives with what was sent.

Its argument is JSON: {"seconds": how long, "compute": whether the devices multiply matrices meanwhile}. Rank 0 prints
one line of JSON after `MARK`.
"""

import json
import sys
import time

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.base.json_reader import parse_json

from ..bench.operations import count_wrong
from .probe_rank import MARK

__all__ = ["main"]

_KINDS = ("sendrecv", "all_gather", "all_sum", "matmul")
_ELEMENTS = (1 << 10, 1 << 18, 1 << 22)  # of 4 bytes: 4 KiB to 16 MiB
_OF_SUMS = 8  # bits that are left free for a sum of 256 ranks
_GPU, _CPU = (2048, 8), (512, 1)  # the side of a matrix, and how many products a round has


def main() -> None:
    parameters = parse_json(sys.argv[1])
    world = mlxdist.init()
    traffic, products = _Traffic(world), _Products() if parameters["compute"] else None
    begin = time.monotonic()
    is_last = False
    while not is_last:
        traffic.move()
        if products is not None:
            traffic.wrong[-1] += products.count_wrong()
        # The clocks of the ranks differ: that of rank 0 counts.
        own = np.array([time.monotonic() - begin >= parameters["seconds"]], np.int32)
        is_last = bool(mlxdist.broadcast(own, 0, group=world)[0])
    seconds = time.monotonic() - begin
    wrong = mlxdist.all_gather(traffic.wrong[None], group=world)
    operations, received = map(int, mlxdist.all_sum(np.array([traffic.operations, traffic.received]), group=world))
    if world.rank() == 0:
        texts = [_text(kind, rank, int(wrong[rank, kind])) for rank, kind in np.argwhere(wrong)]
        found = {"seconds": seconds, "wrong": texts, "operations": operations, "bytes": received}
        print(MARK + json.dumps(found), flush=True)


def _text(kind: int, rank: int, count: int) -> str:
    return f"{_KINDS[kind]}: {count} wrong element{'s' * (count > 1)} on rank {rank}"


class _Traffic:
    """Operations on arrays that no round and no rank has alike: what is left of another one is wrong.

    Attributes:
        wrong: elements that are wrong on this rank, by kind of operation.
        operations, received: how many operations this rank has done, and the bytes that it has got of others by them.
    """

    def __init__(self, world: mlxdist.Group) -> None:
        self._world, self._round = world, 0
        self._base = np.random.default_rng(0).integers(0, 2**31, _ELEMENTS[-1], np.int32)
        self.wrong = np.zeros(len(_KINDS), np.int64)
        self.operations = self.received = 0

    def move(self) -> None:
        """Does all operations once, with all sizes."""
        world, size = self._world, self._world.size()
        for elements in _ELEMENTS:
            self._round += 1
            own = self._array(world.rank(), elements)
            apart = 1 + self._round % max(1, size - 1)  # each other rank in turn
            to, source = (world.rank() + apart) % size, (world.rank() - apart) % size
            self._count(0, mlxdist.sendrecv(own, to, source, group=world), self._array(source, elements), own.nbytes)
            gathered = mlxdist.all_gather(own, group=world).reshape(size, elements)
            total = np.zeros(elements, np.int32)
            for rank in range(size):
                array = self._array(rank, elements)
                self._count(1, gathered[rank], array, own.nbytes if rank != world.rank() else 0)
                total += array >> _OF_SUMS
            self._count(2, mlxdist.all_sum(own >> _OF_SUMS, group=world), total, own.nbytes)
            self.operations += 3

    def _array(self, rank: int, elements: int) -> np.ndarray:
        """The data of a rank in this round."""
        key = (rank * 0x85EBCA6B + self._round * 0x9E3779B1) % 2**31
        return self._base[:elements] ^ np.int32(key)

    def _count(self, kind: int, result: np.ndarray, expected: np.ndarray, received: int) -> None:
        self.wrong[kind] += count_wrong(result, expected)
        self.received += received


class _Products:
    """A product of matrices of small whole numbers, which is exact in any order of its sums."""

    def __init__(self) -> None:
        side, self._times = _CPU if mx.default_device() == mx.cpu else _GPU
        numbers = np.random.default_rng(1).integers(0, 16, (2, side, side))
        self._a, self._b = (mx.array(each.astype(np.float32)) for each in numbers)
        # NumPy's own product of integers takes a minute; that of doubles is exact, too.
        self._product = mx.array((numbers[0].astype(np.float64) @ numbers[1].astype(np.float64)).astype(np.float32))

    def count_wrong(self) -> int:
        products = [self._a @ self._b for _ in range(self._times)]
        return int(mx.sum(mx.stack([product != self._product for product in products])))


if __name__ == "__main__":
    main()
