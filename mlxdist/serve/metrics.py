"""Counters of a server, in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""

import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["Metrics"]

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_OUTCOMES = ("stop", "length", "cancelled", "timeout", "error", "refused")
_HELP = {
    "requests_total": "Requests that have ended, by outcome.",
    "prompt_tokens_total": "Tokens of the prompts of admitted requests.",
    "cached_prompt_tokens_total": "Of these, tokens that the prefix cache had: the rate of both is its hit rate.",
    "generated_tokens_total": "Tokens generated.",
    "draft_tokens_total": "Drafts, of --draft-model or --prompt-lookup.",
    "accepted_draft_tokens_total": "Drafts that became tokens of an answer.",
    "preempted_total": "Times that a request has left the batch for one that comes before it.",
    "steps_total": "Messages of decisions, one broadcast each, those of idle seconds included.",
    "decision_bytes_total": "Bytes of these messages.",
    "restarts_total": "Restarts of all ranks after one has failed; the other counters begin again with each.",
    "running": "Requests in the batch.",
    "queued": "Requests that wait for a place in it.",
    "reserved_tokens": "Tokens that the KV caches of the batch come to have, at most.",
    "prefix_cache_tokens": "Tokens of all sequences in the prefix cache.",
    "active_memory_bytes": "Memory that MLX uses on rank 0: weights, caches and what is being computed.",
}


class Metrics:
    """Counters of a server. Every thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Each outcome is listed from the start: a series that begins with its first event has no rate until the second.
        self._counters: Counter[str] = Counter({_ended(outcome): 0 for outcome in _OUTCOMES})
        self._first: list[int] = [0] * (len(_BUCKETS) + 1)  # requests by the time to their first token
        self._first_seconds = 0.0

    def add(self, name: str, number: int = 1) -> None:
        """Adds ``number`` to a counter. ``name``: one of those above, with labels in braces where it has them."""
        with self._lock:
            self._counters[name] += number

    def end(self, outcome: str) -> None:
        """Counts a request that has ended, by its outcome."""
        self.add(_ended(outcome))

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first[sum(seconds > bound for bound in _BUCKETS)] += 1
            self._first_seconds += seconds

    def text(self, gauges: Mapping[str, float]) -> str:
        """All counters as text, with the values of ``gauges``."""
        with self._lock:
            counters, first, seconds = dict(self._counters), list(self._first), self._first_seconds
        lines = []
        for name, about in _HELP.items():
            kind = "gauge" if name in gauges else "counter"
            counted = {key: value for key, value in counters.items() if key.partition("{")[0] == name}
            values: Mapping[str, float] = {name: gauges[name]} if name in gauges else counted or {name: 0}
            lines += [f"# HELP mlxdist_serve_{name} {about}", f"# TYPE mlxdist_serve_{name} {kind}"]
            lines += [f"mlxdist_serve_{key} {value}" for key, value in sorted(values.items())]
        name = "mlxdist_serve_time_to_first_token_seconds"
        lines += [f"# HELP {name} From the request's arrival to its first token.", f"# TYPE {name} histogram"]
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), range(1, len(first) + 1)):
            lines.append(f'{name}_bucket{{le="{bound}"}} {sum(first[:count])}')
        lines += [f"{name}_sum {seconds:.6f}", f"{name}_count {sum(first)}"]
        return "\n".join(lines) + "\n"


def _ended(outcome: str) -> str:
    return f'requests_total{{outcome="{outcome}"}}'
