"""Disaggregated prefill: two schedulers on rank 0, one of the ranks that compute prompts, one of those that generate.

A request waits in the queue of the :class:`PrefillScheduler`, and its prompt is computed. Then it waits in the queue of
the :class:`DecodeScheduler`, while prefill ranks keep its cache, until decode ranks have a place and memory for it. The
same decision admits it there and has its cache sent. Caches are sent and received in one order, which is that of the
admissions, so that no two ranks wait for each other.

Each scheduler has a thread and a loop of its own. They share one lock.
"""

import bisect
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .answer import Token
from .decisions import MAX_SENDS, Decisions
from .memory import UNLIMITED, reserved
from .metrics import Metrics
from .refusal import Refusal
from .remote_outcome import RemoteToken
from .scheduler import Request, Scheduler, order_of
from .worker import Outcome

__all__ = ["DecodeScheduler", "PrefillScheduler"]


class PrefillScheduler(Scheduler):
    """The scheduler of the prefill ranks, and the one that clients submit requests to.

    Args:
        places, max_queue, heartbeat, metrics: as for :class:`Scheduler`.
        ranks: the prefill and the decode ranks.
        max_total_tokens: the maximum number of tokens of the KV caches on prefill, and on decode ranks.

    Attributes:
        decode: the scheduler of the decode ranks.
    """

    def __init__(
        self,
        places: int,
        max_queue: int,
        heartbeat: float,
        metrics: Metrics,
        ranks: tuple[Sequence[int], Sequence[int]],
        max_total_tokens: tuple[int, int] = (UNLIMITED, UNLIMITED),
    ) -> None:
        super().__init__(places, max_queue, heartbeat, metrics, max_total_tokens[0])
        self._ranks = ranks[0]
        self._sends: list[int] = []  # requests whose caches the next messages have sent
        self._held: dict[int, int] = {}  # tokens of computed prompts that prefill ranks still have, by request
        self.decode = DecodeScheduler(self, places, heartbeat, metrics, ranks[1], max_total_tokens[1])
        self.decode._changed = self._changed

    def submit(self, request: Request) -> None:
        with self._changed:
            super().submit(request)
            self._route(request)

    def put_back(self, request: Request) -> None:
        """Queues a request again that decode ranks have preempted: its cache there is gone."""
        self._put_back(request)
        self._route(request)
        self._changed.notify_all()

    def _route(self, request: Request) -> None:
        """Passes a request of one token on to the decode ranks: they compute the last token of every prompt."""
        if len(request.admission.prompt) == 1:
            self._waiting.remove(request)
            self.decode.add(request, None)

    def decide(self, step: int, size: int, digest: int) -> Decisions:
        with self._changed:
            # A chunk takes as long as many steps of the decode ranks: what they have room for leaves before it.
            self._changed.wait_for(lambda: self._sends or not self.decode.has_next(), self._heartbeat)
        decisions = super().decide(step, size, digest)
        with self._changed:
            send, self._sends = self._sends[:MAX_SENDS], self._sends[MAX_SENDS:]
        return replace(decisions, send=send)

    def deliver(self, outcome: Outcome) -> None:
        """Passes the results of a step to the requests, and computed prompts on to the decode ranks."""
        super().deliver(outcome)
        with self._changed:
            for number in outcome.computed:
                request = self._running.pop(number)
                self._held[number] = len(request.admission.prompt)
                self.decode.add(request, number)

    def send(self, number: int) -> None:
        """Makes a following decision send the cache of a request, whose prompt is computed."""
        self._sends.append(number)
        self._changed.notify_all()

    def release(self, number: int) -> None:
        """Makes a following decision free the cache of a request: it has been sent, or the request has ended."""
        del self._held[number]
        self._finished.append((number, 0))
        self._changed.notify_all()

    def report(self, memory: Sequence[int]) -> None:
        for rank, active in zip(self._ranks, memory, strict=True):
            self._metrics.memory(rank, active)

    def fail(self, reason: str) -> None:
        with self._changed:
            super().fail(reason)
            self.decode.fail(reason)

    def gauges(self) -> dict[str, float]:
        own, others = super().gauges(), self.decode.gauges()
        with self._changed:
            return {name: own[name] + others[name] for name in own} | {
                "prefill_running": own["running"],
                "computed": others["queued"],
                "transfers": self.decode.transfers,
            }

    def is_empty(self) -> bool:
        """Whether no request waits for these ranks, or is computed by them."""
        return not (self._waiting or self._running)

    def _stops(self) -> bool:
        # Decode ranks stop first: they wait for all caches that they have been promised.
        return self._stops_at is not None and self.decode.has_stopped and not self._sends

    def _is_idle(self) -> bool:
        return super()._is_idle() and not self._sends

    def _can_run(self, requests: Sequence[Request]) -> bool:
        needs = [len(request.admission.prompt) for request in requests]
        held = sum(self._held.values())
        return len(requests) <= self._places and reserved(needs) + held <= self._max_total_tokens


class DecodeScheduler(Scheduler):
    """The scheduler of the decode ranks. Its queue has requests whose prompts the ``prefill`` ranks have computed.

    Attributes:
        has_stopped: whether it has made the decision that stops the ranks.
    """

    def __init__(
        self,
        prefill: PrefillScheduler,
        places: int,
        heartbeat: float,
        metrics: Metrics,
        ranks: Sequence[int],
        max_total_tokens: int,
    ) -> None:
        super().__init__(places, 0, heartbeat, metrics, max_total_tokens)
        self._prefill, self._ranks = prefill, ranks
        self._computed: dict[Request, int] = {}  # numbers on prefill ranks, of requests of the queue
        self._sent: dict[int, int] = {}  # the same of requests whose caches are sent, by their numbers here
        self._received = 0
        self.has_stopped = False

    @property
    def transfers(self) -> int:
        """The number of caches that are sent and have not been received."""
        return len(self._sent)

    def add(self, request: Request, number: int | None) -> None:
        """Queues a request, which prefill ranks have by that number; None: they have nothing of it."""
        if self.has_stopped:
            request.events.put(Refusal(self.unavailable, 503))
            request.wake()
            self._has_ended(request, "error")
            return
        bisect.insort(self._waiting, request, key=order_of)
        if number is not None:
            self._computed[request] = number
        self._changed.notify_all()

    def has_next(self) -> bool:
        """Whether there is room for the first request of the queue."""
        return not self.has_stopped and bool(self._next(sys.maxsize))

    def decide(self, step: int, size: int, digest: int) -> Decisions:
        with self._changed:
            decisions = super().decide(step, size, digest)
            for admission in decisions.admit:
                computed = self._computed.pop(self._running[admission.number], None)
                if computed is not None:
                    self._sent[admission.number] = computed
                    self._prefill.send(computed)
            if decisions.stop:
                self.has_stopped = True
                self._changed.notify_all()
            return replace(decisions, received=self._received)

    def deliver(self, outcome: Outcome) -> None:
        with self._changed:
            self._received = outcome.received
            for number in [number for number in self._sent if number < outcome.received]:
                self._prefill.release(self._sent.pop(number))
            self._metrics.received(outcome.received_bytes)
            super().deliver(outcome)
            self._prefill._seconds = self._seconds  # by which it says when a client may come again

    def report(self, memory: Sequence[int]) -> None:
        for rank, active in zip(self._ranks, memory[1:], strict=True):  # the first is of rank 0, which is none of them
            self._metrics.memory(rank, active)

    def _token_of(self, response: Any, request: Request) -> Token:
        assert isinstance(response, RemoteToken)
        return response.with_likely(request.top_logprobs)

    def _put_back(self, request: Request) -> None:
        self._prefill.put_back(request)

    def _has_left(self, request: Request) -> bool:
        has_left = super()._has_left(request)
        if has_left and request in self._computed:
            self._prefill.release(self._computed.pop(request))
        return has_left

    def _stops(self) -> bool:
        until = self._prefill._stops_at
        if until is None:
            return False
        is_empty = not (self._waiting or self._running) and self._prefill.is_empty()
        return is_empty or time.monotonic() >= until
