"""Which calls of a layer the ranks compare at once, and which of them later.

The host waits for a comparison longer than few tokens take, and what it finds is a mistake in the program, so of calls
that look alike only each `EVERY`-th compares: itself and all since the last. That depends on what is equal on all
ranks. Where it is not, one rank compares while another adds up results, and the engine raises Mismatch on both.
"""

from collections.abc import Hashable

import mlx.core as mx
import numpy as np

__all__ = ["EVERY", "Comparisons"]

EVERY = 32


class Comparisons:
    """The calls of one layer that the ranks have compared, and those that wait for the next comparison."""

    def __init__(self) -> None:
        self._compared: set[Hashable] = set()
        self._open: list[mx.array] = []

    def __deepcopy__(self, memo: dict) -> "Comparisons":
        return Comparisons()  # the copy has calls of its own

    def can_wait(self, call: Hashable) -> bool:
        """Whether a call that looks like this one, in all but its values, was compared and no comparison is due."""
        return call in self._compared and len(self._open) < EVERY - 1

    def put_off(self, indices: mx.array) -> None:
        self._open.append(indices)

    def take_open(self) -> np.ndarray:
        """The experts of the calls since the last comparison, to be compared now: int64 of one dimension."""
        taken, self._open = self._open, []
        flat = (np.array(indices).reshape(-1).astype(np.int64) for indices in taken)
        return np.concatenate([np.zeros(0, np.int64), *flat])

    def note(self, call: Hashable) -> None:
        """Records that the ranks have compared a call that looks like this one."""
        self._compared.add(call)
