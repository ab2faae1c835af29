"""Continuous batching: rank 0 decides which requests wait, run and end. The other ranks get only its decisions."""

import bisect
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

from .answer import Answer, PromptTokens, Token
from .decisions import FRAME, MAX_ADMISSIONS, MAX_ENDS, ROOM, Admission, Decisions
from .draft_policy import DraftPolicy
from .memory import UNLIMITED, reserved
from .metrics import Metrics
from .refusal import Refusal, sentence
from .token_logprobs import token_of
from .worker import Outcome

__all__ = ["LATE", "Request", "Scheduler", "order_of"]

_MAX_RETRY_AFTER = 600  # seconds
_LEVEL = 60.0  # seconds of waiting that a level of priority is worth
_REPORT_SECONDS = 5.0  # between two reports of the ranks
_STOPS = "the server stops"
LATE = "the request has taken too long"


class Request:
    """A request of a client, from its arrival on.

    Attributes:
        answer: the text of its answer, and where that ends.
        events: a queue for the thread that answers: cached tokens of the prompt, once admitted; (computed, all) tokens
            of its prompt; its PromptTokens, if it asks for them; Tokens up to one with a finish_reason; or a Refusal,
            which is the last event.
        wake: called after events were put into the queue, by the thread that has put them.
        order: its place in the queue, the least first. It does not change while a request waits: a later request
            overtakes it only within a minute for each level of priority between them.
    """

    def __init__(
        self,
        admission: Admission,
        answer: Answer,
        *,
        timeout: float,
        priority: int = 0,
        top_logprobs: int | None = None,
        wake: Callable[[], None] = lambda: None,
        arrived: float | None = None,
    ) -> None:
        """Initializes a request. ``admission`` has no number yet.

        Args:
            timeout: seconds from its arrival to its end.
            top_logprobs: None without logprobs.
            arrived: when it has come, by time.monotonic(); None for now.
        """
        self.admission = self._asked = admission
        self.answer, self.top_logprobs, self.wake = answer, top_logprobs, wake
        self.queued = time.monotonic()  # once it has been made into tokens
        self.arrived = self.queued if arrived is None else arrived
        self.order = self.queued + priority * _LEVEL
        self.deadline = self.arrived + timeout
        self.events: SimpleQueue[int | tuple[int, int] | PromptTokens | Token | Refusal] = SimpleQueue()
        self.cached: int | None = None  # tokens of the prompt that the prefix cache had; None until it is admitted
        self._scored: list[Token] = []  # tokens of the prompt, until there are all
        self.generated: list[int] = []  # tokens, those that wait in its answer included
        self.begun = 0.0  # when it first got a place in the batch
        self.first = self.last = 0.0  # when the first and the last token came
        self.last_step = 0  # the step of the last token
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """Cancels the request, unless it has ended. Any thread may call this."""
        self._is_cancelled.set()

    def leaves(self) -> str:
        """The outcome with which the request ends now, "cancelled" or "timeout"; empty if it continues."""
        if self._is_cancelled.is_set():
            return "cancelled"
        return "timeout" if time.monotonic() > self.deadline else ""

    @property
    def kept(self) -> int:
        """The number of tokens of the request's prompt and answer, without a stop word."""
        made = len(self.generated) if self.answer.length is None else self.answer.length
        return len(self._asked.prompt) + made

    def add_scored(self, tokens: Sequence[Token]) -> None:
        """Adds the next tokens of the prompt with log-probabilities."""
        self._scored += tokens
        if len(self._scored) == len(self._asked.prompt):
            self.events.put(PromptTokens(tuple(self._scored)))
            self._asked = replace(self._asked, prompt_logprobs=None)  # also when it is admitted again
            self.admission = replace(self.admission, prompt_logprobs=None)

    def preempt(self) -> None:
        """Appends the answer so far to the prompt, so that the request can be admitted again and continue there."""
        self._scored.clear()  # a part of the prompt is computed again from its beginning
        asked, made = self._asked, len(self.generated)
        if made:
            self.admission = replace(
                asked,
                prompt=[*asked.prompt, *self.generated],
                segments=[*asked.segments, made],
                max_tokens=asked.max_tokens - made,
                generated=made,
            )


class Scheduler:
    """Serves requests by priority, then by arrival, in ``places`` places.

    At most ``max_queue`` requests wait. Where there is no place or memory for the first of them, the scheduler
    preempts running requests that come after it in the order. Preempted requests continue later, with the same tokens.

    The thread of the model calls all methods but :meth:`submit` and :meth:`stop`, which other threads call.

    Args:
        heartbeat: seconds after which an idle server still sends a message: the ranks wait for it with the deadline of
            any operation, and a rank that has died is found.
        max_total_tokens: the maximum number of tokens of the KV caches of all running requests.
        num_draft_tokens: drafts of each request in a step, where they pay; 0 without drafts.
    """

    def __init__(
        self,
        places: int,
        max_queue: int,
        heartbeat: float,
        metrics: Metrics,
        max_total_tokens: int = UNLIMITED,
        num_draft_tokens: int = 0,
    ) -> None:
        self._places, self._max_queue, self._heartbeat = places, max_queue, heartbeat
        self._max_total_tokens = max_total_tokens
        self._metrics = metrics
        self._policy = DraftPolicy(num_draft_tokens)
        self._changed = threading.Condition()
        self._waiting: list[Request] = []  # by their order
        self._running: dict[int, Request] = {}
        self._finished: list[tuple[int, int]] = []  # what the next messages have as ``end``
        self._numbered = 0
        self._delivered = 0  # steps
        self._only_decodes = False  # in the step that begins: nothing comes or goes
        self._seconds = 0.0  # that a request takes, a moving mean
        self._unavailable = ""
        self._stops_at: float | None = None  # None: it goes on
        self._reports_at = time.monotonic() + _REPORT_SECONDS

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            Refusal: 429 where the queue is full, 503 where the server has failed or stops.
        """
        with self._changed:
            if self.unavailable:
                left = None if self._stops_at is None else self._stops_at - time.monotonic()
                raise Refusal(self.unavailable, 503, retry_after=None if left is None else _retry_after(left))
            free = self._places - len(self._running)  # which the next decision fills
            if len(self._waiting) >= free + self._max_queue:
                raise Refusal(
                    f"{self._max_queue} requests wait already; try again later",
                    429,
                    retry_after=_retry_after(self._seconds * (len(self._waiting) + 1) / self._places),
                )
            bisect.insort(self._waiting, request, key=order_of)
            self._changed.notify_all()

    def stop(self, drain: float = 0.0) -> None:
        """Refuses requests from now on, and makes a decision stop the server: once all have ended, in at most ``drain``
        seconds. A second call stops it at once. Any thread may call this, also the model's, in a signal handler.
        """
        self._stops_at = time.monotonic() + (drain if self._stops_at is None else 0.0)
        with self._changed:  # which that thread may hold: it is an RLock
            self._changed.notify_all()

    def _stops(self) -> bool:
        if self._stops_at is None:
            return False
        return not (self._waiting or self._running) or time.monotonic() >= self._stops_at

    def _is_idle(self) -> bool:
        """Whether the next message would have nothing to say."""
        return not (self._waiting or self._running or self._finished)

    def decide(self, step: int, size: int, digest: int) -> Decisions:
        """Decisions for the next step, in a message of ``size`` bytes. Waits while there is nothing to do."""
        self._metrics.step(size)
        with self._changed:
            if self._is_idle() and not self._stops():
                self._changed.wait(self._heartbeat)
            end, self._finished = self._finished[:MAX_ENDS], self._finished[MAX_ENDS:]
            if self._stops():
                self._end_all(_STOPS)
                return Decisions(step, digest, end, stop=True)
            left = (number for number, request in self._running.items() if self._has_left(request))
            leaving = list(itertools.islice(left, MAX_ENDS - len(end)))  # looks at no more than that
            end += [(number, self._running.pop(number).kept) for number in leaving]
            self._waiting = [request for request in self._waiting if not self._has_left(request)]
            end += self._preempt(MAX_ENDS - len(end))
            admitted: list[Admission] = []
            for request in self._next(size - FRAME + ROOM):
                self._waiting.pop(0)
                request.admission = replace(request.admission, number=self._numbered)
                request.begun = request.begun or time.monotonic()
                self._running[self._numbered] = request
                self._numbered += 1
                admitted.append(request.admission)
            following = [request.admission for request in self._next(sys.maxsize)]
            fits = sum(request.size for request in following) <= ROOM
            brought = 0 if fits else sum(request.brought for request in following)
            reports = time.monotonic() >= self._reports_at
            if reports:
                self._reports_at = time.monotonic() + _REPORT_SECONDS
            self._only_decodes = not (end or admitted)
            drafts = self._policy.begin(len(self._running))
            return Decisions(step, digest, end, admitted, next_size=FRAME + brought, reports=reports, drafts=drafts)

    def deliver(self, outcome: Outcome) -> None:
        """Passes the results of a step to the requests."""
        self._policy.end(len(outcome.tokens), self._only_decodes and not outcome.prefill)
        self._delivered += 1
        woken: dict[int, Request] = {}
        for number, cached in outcome.cached.items():
            request = woken[number] = self._running[number]
            if request.cached is not None:  # it goes on
                continue
            request.cached = cached
            request.events.put(cached)
            self._metrics.admitted(request.begun - request.queued, len(request.admission.prompt), cached)
        for number, tokens in outcome.prompt_logprobs.items():
            request = woken[number] = self._running[number]
            request.add_scored(tokens)
        for response in outcome.prefill:
            request = woken[response.uid] = self._running[response.uid]
            request.events.put(response.progress)
        self._metrics.drafted(outcome.drafted, outcome.accepted)
        for response in outcome.tokens:
            if response.uid in self._running:  # no stop word has ended it, before this token
                woken[response.uid] = self._running[response.uid]
                self._deliver_token(response, outcome.failed.get(response.uid, ""))
        for request in woken.values():
            request.wake()

    def _deliver_token(self, response: Any, failed: str) -> None:
        """Adds a token to its answer. ``failed``: why a complete answer does not match its grammar, or ""."""
        request, reason = self._running[response.uid], response.finish_reason
        request.generated.append(response.token)
        now = time.monotonic()
        if len(request.generated) == 1:
            request.first = now
            self._metrics.first_token(now - request.arrived)
        else:
            self._metrics.token(0.0 if request.last_step == self._delivered else now - request.last)
        request.last, request.last_step = now, self._delivered
        error = f"the grammar of the request has failed: {failed}" if failed and reason else ""
        tokens: list[Token] = []
        try:
            tokens = request.answer.add(self._token_of(response, request))
        except Exception as raised:  # tokenizers raise what they like
            error = f"the tokens of the answer cannot be made into text: {sentence(raised)}"
        if request.answer.length is not None:
            reason, error = "stop", ""
            del request.generated[request.answer.length + 1 :]
        for event in [Refusal(error, 500)] if error else tokens:
            request.events.put(event)
        if reason is not None or error:
            self._finish(response.uid, "error" if error else reason)

    def _token_of(self, response: Any, request: Request) -> Token:
        return token_of(response, request.top_logprobs)

    def _finish(self, number: int, outcome: str) -> None:
        request = self._running.pop(number)
        self._finished.append((number, request.kept))
        seconds = time.monotonic() - request.arrived
        self._seconds += (seconds - self._seconds) / 8 if self._seconds else seconds
        self._has_ended(request, outcome)

    def report(self, memory: Sequence[int]) -> None:
        """Takes the bytes that MLX uses on each rank, after a decision with ``reports``."""
        for rank, active in enumerate(memory):
            self._metrics.memory(rank, active)

    def fail(self, reason: str) -> None:
        """Ends all requests, and those that arrive later."""
        with self._changed:
            self._end_all(f"the server has failed: {reason}")

    @property
    def unavailable(self) -> str:
        """The reason why no request is accepted; empty if requests are accepted."""
        return self._unavailable or ("" if self._stops_at is None else _STOPS)

    def gauges(self) -> dict[str, float]:
        needs = [request.admission.tokens for request in list(self._running.values())]
        return {
            "running": len(needs),
            "queued": len(self._waiting),
            "reserved_tokens": reserved(needs),
            "drafts_per_step": self._policy.drafts,
        }

    def _next(self, room: int) -> list[Request]:
        """The first requests of the queue that can run now and fit into ``room`` bytes."""
        found: list[Request] = []
        for request in self._waiting[:MAX_ADMISSIONS]:
            room -= request.admission.size
            # A later request that would fit does not overtake: else a large request could wait forever.
            if room < 0 or not self._can_run([*self._running.values(), *found, request]):
                break
            found.append(request)
        return found

    def _can_run(self, requests: Sequence[Request]) -> bool:
        """Whether these requests can run together."""
        needs = [request.admission.tokens for request in requests]
        return len(requests) <= self._places and reserved(needs) <= self._max_total_tokens

    def _preempt(self, most: int) -> list[tuple[int, int]]:
        """Ends the requests whose places the first of the queue needs, and puts them back into the queue."""
        first, left = self._waiting[:1], dict(self._running)
        taken: list[int] = []
        while first and len(taken) < most and not self._can_run([*left.values(), *first]):
            last = max(left, key=lambda number: left[number].order, default=None)
            # Then the requests in ``taken`` continue: their places alone are not enough for the first of the queue.
            if last is None or left[last].order <= first[0].order:
                return []
            del left[last]
            taken.append(last)
        end = []
        for number in taken:
            request = self._running.pop(number)
            end.append((number, request.kept))
            request.preempt()
            self._put_back(request)
            self._metrics.preempted()
        return end

    def _put_back(self, request: Request) -> None:
        """Queues a request that has been preempted."""
        bisect.insort(self._waiting, request, key=order_of)

    def _has_left(self, request: Request) -> bool:
        outcome = request.leaves()
        if outcome:
            late = outcome == "timeout"
            request.events.put(Refusal(LATE, 504) if late else Refusal("cancelled", 499))
            request.wake()
            self._has_ended(request, outcome)
        return bool(outcome)

    def _end_all(self, reason: str) -> None:
        self._unavailable = reason
        for request in (*self._running.values(), *self._waiting):
            request.events.put(Refusal(reason, 503))
            request.wake()
            self._has_ended(request, "error")
        self._running.clear()
        self._waiting.clear()

    def _has_ended(self, request: Request, outcome: str) -> None:
        self._metrics.ended(outcome, time.monotonic() - request.arrived)


order_of = attrgetter("order")


def _retry_after(seconds: float) -> int:
    """``seconds``, which may be infinite: those of --drain."""
    return math.ceil(min(max(seconds, 1), _MAX_RETRY_AFTER))
