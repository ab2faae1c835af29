"""Disaggregated prefill: the steps of the ranks that compute prompts, and of those that generate.

Both are those of :class:`Worker`. Prefill ranks compute all of a prompt but its last token, keep the caches of its
layers until rank 0 has them sent, and have the prefix cache. Decode ranks begin with the last token, as with a prompt
whose other tokens the prefix cache has, and so sample the tokens that one process samples.

Rank 0 is no decode rank. It decides for them, too, and has their results from the first of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.runtime.group.group import Group

from .decisions import Admission, Decisions
from .kv_transfers import KVTransfers
from .remote_outcome import recv_outcome, send_outcome
from .request_cache import RequestCache
from .row_caches import of_layers
from .worker import Outcome, Worker

__all__ = ["DecodeWorker", "PrefillWorker", "RemoteDecoder"]


class PrefillWorker(Worker):
    """The batch of prompts on this rank.

    Attributes:
        transfers: by which caches are sent; set before the first step.
    """

    transfers: KVTransfers

    def __init__(self, *arguments: Any) -> None:
        self._held: dict[int, tuple[list[Any], int]] = {}  # caches of computed prompts, and their tokens
        super().__init__(*arguments)

    def try_transfer(self) -> None:
        """Sends the caches of a prompt of two tokens. Raises as `mlxdist.kv.send`, on all ranks alike."""
        cache = self._prompt_cache(0)
        mx.eval(self._model(mx.array([[0, 0]]), cache=cache), [each.state for each in of_layers(cache)])
        self.transfers.send(_layers(cache))
        self.transfers.wait()

    def step(self, decisions: Decisions) -> Outcome:
        for number in decisions.send:
            self.transfers.send(self._held[number][0])
        outcome = super().step(decisions)
        outcome.computed = [response.uid for response in outcome.prefill if _is_computed(response)]
        for number, (cache, tokens) in self._generator.remove(outcome.computed, return_prompt_caches=True).items():
            layers = _layers(cache)
            mx.async_eval([each.state for each in layers])  # lazy arrays keep those of the whole batch
            self._held[number] = layers, len(tokens)
            del self._running[number]
        return outcome

    def end(self, requests: Sequence[tuple[int, int]]) -> None:
        for number, _ in requests:
            self._held.pop(number, None)
        super().end(requests)

    def close(self) -> None:
        self.transfers.close()
        super().close()

    def _admit(self, request: Admission) -> int:
        return super()._admit(replace(request, max_tokens=1, grammar=b""))  # nothing is sampled here

    def _fetch(self, request: Admission, cache: list[Any]) -> int:
        # A prompt is computed once a chunk of it is: one token before the last is left, if the prefix cache has all.
        return super()._fetch(replace(request, prompt=request.prompt[:-1]), cache)

    def _reserved(self) -> int:
        return super()._reserved() + sum(tokens for _, tokens in self._held.values())


class DecodeWorker(Worker):
    """The batch of requests that generate on this rank.

    Attributes:
        transfers: by which caches are received; set before the first step.
        results: the group of rank 0 and the decode ranks, for the results; set before the first step.
    """

    transfers: KVTransfers
    results: Group

    def try_transfer(self) -> None:
        """Receives what :meth:`PrefillWorker.try_transfer` sends. Raises as `mlxdist.kv.recv`, on all ranks alike."""
        self.transfers.receive(-1)  # less than the numbers of requests
        self.transfers.arrived(wait=True)
        self.transfers.take(-1)

    def step(self, decisions: Decisions) -> Outcome:
        self._received = decisions.received
        for request in decisions.admit:
            if len(request.prompt) > 1:
                self.transfers.receive(request.number)
        outcome = super().step(decisions)
        if self.results.rank() == 1:
            # Without a request that generates there is nothing to do but to wait.
            outcome.received, outcome.received_bytes = self.transfers.arrived(wait=not self._running)
            listed = {response.uid for response in outcome.tokens if self._running[response.uid].logprobs}
            send_outcome(outcome, self.digest, listed, self.results)
        return outcome

    def compare(self, reports: np.ndarray) -> None:
        super().compare(reports[1:])  # the first is of rank 0, which is no decode rank

    def close(self) -> None:
        self.transfers.close()
        super().close()

    def _is_read(self, request: Admission) -> bool:
        return len(request.prompt) == 1 or request.number < self._received

    def _fetch(self, request: Admission, cache: list[Any]) -> int:
        if len(request.prompt) > 1:
            cache[:] = _filled(cache, self.transfers.take(request.number))
        return len(request.prompt) - 1


class RemoteDecoder:
    """The batch of the decode ranks, on rank 0.

    Args:
        group: rank 0 and the decode ranks.

    Attributes:
        digest: that of the decode ranks; see :class:`Worker`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.digest = 0

    def step(self, decisions: Decisions) -> Outcome:
        """The results of a step of the decode ranks. Raises Mismatch: what they send is none."""
        outcome, self.digest = recv_outcome(self._group)
        return outcome

    def end(self, requests: Sequence[tuple[int, int]]) -> None:
        """Does nothing: rank 0 has none of the caches."""

    def report(self) -> np.ndarray:
        """A report in the form of those of the decode ranks."""
        return np.zeros(3, np.int64)

    def compare(self, reports: np.ndarray) -> None:
        """Does nothing; see :meth:`end`."""


def _layers(cache: list[Any]) -> list[Any]:
    """mlx-lm's caches of the layers in a prompt cache of one request."""
    layers = of_layers(cache)
    return list(layers[0].caches) if isinstance(layers[0], RequestCache) else layers


def _filled(cache: list[Any], layers: list[Any]) -> list[Any]:
    """A prompt cache in the form of ``cache``, which is new, with these caches of the layers."""
    own = of_layers(cache)
    return [*([RequestCache(*layers)] if isinstance(own[0], RequestCache) else layers), *cache[len(own) :]]


def _is_computed(response: Any) -> bool:
    """Whether all of a prompt but its last token is computed."""
    done, total = response.progress
    return bool(response.end_of_segment and done == total - 1)
