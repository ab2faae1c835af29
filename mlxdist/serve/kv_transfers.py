"""Transfers of prompt caches from prefill to decode ranks, by `mlxdist.kv`, in a thread of each rank.

The thread has lanes of its own: prompts are computed and tokens generated meanwhile. Transfers begin in the order of
rank 0's decisions, which is the same on all ranks, and one follows the other.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_reduce

from mlxdist import kv
from mlxdist.kv.cache_layout import CacheLayout
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather

from .quantized_cache import as_of_mlx_lm, loaded_caches

__all__ = ["KVTransfers"]

_Received = tuple[list[Any], int]  # the caches of the layers, and their bytes on all ranks of this side


class KVTransfers:
    """The transfers of this rank.

    Args:
        layout: of this rank's model.
        peers: the ranks of the other side.
        group: all ranks, for the thread alone.
        side: the ranks of this side, for the thread alone.
    """

    def __init__(self, layout: CacheLayout, peers: Sequence[int], group: Group, side: Group) -> None:
        self._layout, self._peers, self._group, self._side = layout, list(peers), group, side
        self._thread = ThreadPoolExecutor(1, "mlxdist kv")
        self._sent: deque[Future[None]] = deque()
        self._arriving: deque[tuple[int, Future[_Received]]] = deque()
        self._received: dict[int, Future[_Received]] = {}  # those that have not been taken
        self._arrived = 0

    def send(self, cache: Sequence[Any]) -> None:
        """Begins to send the caches of the layers of a request."""
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        layers = as_of_mlx_lm(cache)
        mx.async_eval([each.state for each in layers])  # another thread cannot begin to compute these arrays
        self._sent.append(self._thread.submit(self._send, layers))

    def receive(self, number: int) -> None:
        """Begins to receive the caches of the layers of a request; numbers ascend."""
        self._received[number] = received = self._thread.submit(self._receive)
        self._arriving.append((number, received))

    def arrived(self, wait: bool) -> tuple[int, int]:
        """The least number above those of requests whose caches have come to all ranks of this side, and the bytes of
        caches since the last call. With ``wait`` it waits for the next one, if one is to come."""
        held = 0
        while self._arriving and (wait or self._arriving[0][1].done()):
            number, received = self._arriving.popleft()
            self._arrived, wait = number + 1, False
            held += received.result()[1]
        return self._arrived, held

    def take(self, number: int) -> list[Any]:
        """The received caches of the layers of a request. Waits for them."""
        return loaded_caches(self._received.pop(number).result()[0])

    def wait(self) -> None:
        """Waits for all transfers that have begun. Raises the error of one that has failed."""
        transfers: list[Future[Any]] = [*self._sent, *self._received.values()]
        for transfer in transfers:
            transfer.result()

    def close(self) -> None:
        """Ends the thread, after :meth:`wait`."""
        self.wait()
        self._thread.shutdown()

    def _send(self, cache: list[Any]) -> None:
        kv.send(cache, self._peers, model=self._layout, group=self._group)

    def _receive(self) -> _Received:
        cache = kv.recv(self._peers, model=self._layout, group=self._group)
        held = tree_reduce(lambda total, x: total + getattr(x, "nbytes", 0), [each.state for each in cache], 0)
        # Behind it all ranks of this side have the request's caches: none of them waits for its own in a step.
        return cache, int(all_gather(np.array([held], np.int64), group=self._side).sum())
