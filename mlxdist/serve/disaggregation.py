"""Disaggregated prefill: some ranks compute prompts, and the others generate. Each side has the model on its ranks.

Without it all ranks are one side, which does both.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from mlx import nn

from mlxdist import kv
from mlxdist.base.errors import Aborted, Error, InvalidArgument, PeerLost, Timeout, TransportError
from mlxdist.base.host_identity import host_identity
from mlxdist.kv.cache_layout import CacheLayout
from mlxdist.nn.rank_checks import agreed, texts
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather

from .disaggregated_scheduler import PrefillScheduler
from .disaggregated_worker import DecodeWorker, PrefillWorker, RemoteDecoder
from .kv_transfers import KVTransfers
from .log import say
from .metrics import Metrics
from .options import ServeOptions
from .scheduler import Scheduler
from .worker import Worker

__all__ = ["Side", "check_ranks", "side_of"]

_OF_ALL = (Aborted, PeerLost, Timeout, TransportError)  # errors that all ranks have, whichever finds them
_Loop = Callable[[Group, Any, Scheduler | None], None]


def check_ranks(options: ServeOptions, size: int) -> None:
    """Checks the options that name the ranks of the sides, in a job of ``size`` ranks.

    Raises:
        InvalidArgument: a rank is on no side, on two, or is none; rank 0 is no prefill rank.
    """
    named = {"--prefill-ranks": options.prefill_ranks, "--decode-ranks": options.decode_ranks}
    if not options.is_disaggregated:
        return
    for option, ranks in named.items():
        if not ranks:
            raise InvalidArgument(f"serve: {option} names no rank; give both --prefill-ranks and --decode-ranks")
        for place, rank in enumerate(ranks):
            if rank not in range(size):
                raise InvalidArgument(f"serve: {option} names rank {rank}, and the ranks are 0 to {size - 1}")
            if rank in ranks[:place]:
                raise InvalidArgument(f"serve: {option} names rank {rank} twice")
    for rank in range(size):
        sides = sum(rank in ranks for ranks in named.values())
        if sides != 1:
            where = "in both of" if sides else "in neither of"
            raise InvalidArgument(f"serve: rank {rank} is {where} --prefill-ranks and --decode-ranks")
    if 0 not in options.prefill_ranks:
        raise InvalidArgument("serve: rank 0, which has the requests, must be one of --prefill-ranks")


def side_of(options: ServeOptions, group: Group) -> "Side":
    """The side of this rank. Collective over ``group``, all ranks."""
    return DisaggregatedSide(options, group) if options.is_disaggregated else Side(options, group)


class Side:
    """The ranks that share a model with this one: all of the job.

    Attributes:
        group: these ranks.
        own: a lane of them: MLX computes a token ahead in the other.
        decisions: rank 0, and the ranks that carry out the same decisions.
        job: a lane of all ranks.
        layout, limits: the operator's options for these ranks.
        neighbors: the number of ranks on this host, if some of them are on another side.
        has_prefix_cache: whether these ranks have the prefix cache.
    """

    neighbors: int | None = None
    has_prefix_cache = True

    def __init__(self, options: ServeOptions, group: Group) -> None:
        self.group = group
        self.own = self.decisions = self.job = _split(group, 0)
        self.layout, self.limits = options.layout, options.limits

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """A context in which these ranks load the model, and communicate with no other side."""
        yield

    def inspect(self, model: nn.Module) -> None:
        """Takes what later steps need of the sharded model, before its layers are replaced by faster ones."""

    def worker(self, model: nn.Module, tokenizer: Any) -> Worker:
        """The batch on this rank."""
        return Worker(model, tokenizer, self.limits)

    def connect(self, worker: Worker, tokens: int) -> int:
        """Connects the sides, where there are several. Collective.

        ``tokens``: what the caches of these ranks have room for. Returns what a single request may have.
        """
        return tokens

    def scheduler(self, options: ServeOptions, heartbeat: float, metrics: Metrics, tokens: int) -> Scheduler:
        """The scheduler, for rank 0, whose clients submit requests to it."""
        places, drafts = self.limits.decode_concurrency, self.limits.num_draft_tokens
        return Scheduler(places, options.max_queue, heartbeat, metrics, tokens, drafts)

    def run(self, loop: _Loop, worker: Worker, scheduler: Scheduler | None) -> None:
        """Calls ``loop`` for these ranks, and on rank 0 for those of the other side."""
        loop(self.decisions, worker, scheduler)


class DisaggregatedSide(Side):
    """The prefill ranks, on one of them; or the decode ranks, on one of these."""

    _layout: CacheLayout

    def __init__(self, options: ServeOptions, group: Group) -> None:
        rank, prefill, decode = group.rank(), sorted(options.prefill_ranks), sorted(options.decode_ranks)
        self._ranks, self.has_prefix_cache = (prefill, decode), rank in prefill
        own, self._peers = self._ranks if self.has_prefix_cache else self._ranks[::-1]
        self.group, self.job = _split(group, int(self.has_prefix_cache)), _split(group, 0)
        self.own = _split(self.group, 0)
        self._transfers, self._received = _split(group, 0), _split(self.group, 0)  # for the thread of transfers
        self._results = group.split(0 if rank == 0 or not self.has_prefix_cache else -1)
        self.decisions = self.own if self.has_prefix_cache or self._results is None else self._results
        # Each side has equal shares: those that are measured, or given, are of all ranks together.
        self.layout = replace(options.layout, rank_shares=(1.0,) * len(own))
        self.limits = options.limits if self.has_prefix_cache else replace(options.limits, prompt_cache_tokens=0)
        self.neighbors = texts(host_identity(), self.job).count(host_identity())
        if rank == 0:
            say(f"ranks {_listed(prefill)} compute prompts, and ranks {_listed(decode)} generate")

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        with agreed(name, self.job):
            yield

    def inspect(self, model: nn.Module) -> None:
        self._layout = kv.layout_of(model)

    def worker(self, model: nn.Module, tokenizer: Any) -> Worker:
        return (PrefillWorker if self.has_prefix_cache else DecodeWorker)(model, tokenizer, self.limits)

    def connect(self, worker: Worker, tokens: int) -> int:
        assert isinstance(worker, PrefillWorker | DecodeWorker)
        worker.transfers = KVTransfers(self._layout, self._peers, self._transfers, self._received)
        if isinstance(worker, DecodeWorker):
            assert self._results is not None
            worker.results = self._results
        worker.try_transfer()
        found = all_gather(np.array([tokens], np.int64), group=self.job).tolist()
        self._tokens = tuple(min(found[rank] for rank in ranks) for ranks in self._ranks)
        return min(found)

    def scheduler(self, options: ServeOptions, heartbeat: float, metrics: Metrics, tokens: int) -> Scheduler:
        for name, ranks in zip(("prefill", "decode"), self._ranks):
            metrics.side(name, ranks)
        places = self.limits.decode_concurrency
        return PrefillScheduler(places, options.max_queue, heartbeat, metrics, self._ranks, self._tokens)

    def run(self, loop: _Loop, worker: Worker, scheduler: Scheduler | None) -> None:
        if not isinstance(scheduler, PrefillScheduler):
            loop(self.decisions, worker, scheduler)
            return
        assert self._results is not None  # on rank 0
        decode = _DecodeLoop(loop, self._results, scheduler)
        try:
            loop(self.decisions, worker, scheduler)
        except Error as error:
            if decode.error is not None and isinstance(error, Aborted):  # by that thread
                raise decode.error from error
            raise
        decode.end()


class _DecodeLoop:
    """The thread of rank 0 that decides for the decode ranks.

    Attributes:
        error: the error with which it has ended.
    """

    def __init__(self, loop: _Loop, group: Group, scheduler: PrefillScheduler) -> None:
        self._loop, self._group, self._scheduler = loop, group, scheduler
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mlxdist decode", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for its end. Raises its error."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._loop(self._group, RemoteDecoder(self._group), self._scheduler.decode)
        except BaseException as error:  # for the other thread
            self.error = error
            if not isinstance(error, _OF_ALL):
                with contextlib.suppress(Error):
                    self._group.abort(f"serve: rank 0 cannot decide for the decode ranks: {error}")


def _split(group: Group, color: int) -> Group:
    found = group.split(color)
    assert found is not None  # the color is not negative
    return found


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
