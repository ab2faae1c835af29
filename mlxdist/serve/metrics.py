"""Metrics of a server, in Prometheus' text format, with the meanings of vLLM's (a table is in docs/serve.md).

Rank 0 has :class:`Metrics`, the application of HTTP has :class:`HttpMetrics`. Each has a registry of its own, and none
has a name that the other has, so that /metrics is the text of both.
"""

from collections.abc import Collection, Iterable, Mapping

from mlxdist.base.prometheus import Registry

__all__ = ["CONTENT_TYPE", "HttpMetrics", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAMESPACE = "mlxdist_serve"
_OUTCOMES = ("stop", "length", "cancelled", "timeout", "error", "refused")
# Seconds. A token takes 1 ms to seconds; a request, up to --request-timeout and beyond.
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Metrics of rank 0. Every thread may call every method.

    Args:
        restarts: how often the launcher has restarted the ranks, this process included.
    """

    def __init__(self, restarts: int = 0) -> None:
        self._registry = registry = Registry(_NAMESPACE)
        counter, gauge, histogram = registry.counter, registry.gauge, registry.histogram
        ended = counter("requests", "Requests that have ended, by outcome.", "outcome")
        # Each outcome is listed from the start: a series that begins with its first event has no rate until the second.
        self._ended = {outcome: ended.labels(outcome) for outcome in _OUTCOMES}
        self._prompt = counter("prompt_tokens", "Tokens of the prompts of admitted requests.")
        self._cached = counter("cached_prompt_tokens", "Of these, tokens that the prefix cache had.")
        self._generated = counter("generated_tokens", "Tokens generated.")
        self._drafted = counter("draft_tokens", "Drafts, of --draft-model, --mtp or --prompt-lookup.")
        self._accepted = counter("accepted_draft_tokens", "Drafts that became tokens of an answer.")
        self._preempted = counter("preempted", "Times that a request has left the batch for one that comes before it.")
        self._steps = counter("steps", "Messages of decisions, one broadcast each, those of idle seconds included.")
        self._decision_bytes = counter("decision_bytes", "Bytes of these messages.")
        self._kv_bytes = counter("kv_bytes", "Bytes of prompt caches that decode ranks have received.")
        counter("restarts", "Restarts of all ranks; the other counters of rank 0 begin again with each.").inc(restarts)
        self._queue = histogram(
            "request_queue_seconds", "From when a request is queued to its place in the batch.", _REQUEST_SECONDS
        )
        self._first = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _REQUEST_SECONDS
        )
        self._between = histogram(
            "inter_token_seconds", "From a step with tokens of a request to its next one.", _TOKEN_SECONDS
        )
        self._whole = histogram(
            "request_seconds", "From the arrival to the end of requests that end with stop or length.", _REQUEST_SECONDS
        )
        self._gauges = {
            name: gauge(name, about)
            for name, about in {
                "running": "Requests in the batch.",
                "queued": "Requests that wait for a place in it.",
                "prefill_running": "Requests in the batch whose prompts prefill ranks compute.",
                "computed": "Requests whose prompts are computed, and that wait for a place on the decode ranks.",
                "transfers": "Requests whose prompt caches are on their way to the decode ranks.",
                "reserved_tokens": "Tokens that the KV caches of the batch come to have, at most.",
                "drafts_per_step": "Drafts of a request in a step, at most; 0 without them and while they do not pay.",
                "prefix_cache_tokens": "Tokens of the prefix cache in memory; those that sequences share count once.",
                "prefix_cache_snapshots": "States of the prefix cache in memory from which prompts can go on.",
                "prefix_cache_disk_bytes": "Bytes of the prefix cache on the disk of the rank with the largest shard.",
            }.items()
        }
        self._memory = gauge(
            "active_memory_bytes", "Memory that MLX uses: weights, caches and what is being computed.", "rank"
        )
        self._side = gauge("rank_side", "1 for each rank with its side, prefill or decode.", "rank", "side")

    def step(self, size: int) -> None:
        """Counts a message of decisions of ``size`` bytes."""
        self._steps.inc()
        self._decision_bytes.inc(size)

    def admitted(self, queue_seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a request that has got a place in the batch, the first time it gets one."""
        self._queue.observe(queue_seconds)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)

    def first_token(self, seconds: float) -> None:
        """Counts the first token of a request. ``seconds``: since the request arrived."""
        self._generated.inc()
        self._first.observe(seconds)

    def token(self, seconds: float) -> None:
        """Counts a token of a request, not its first one.

        ``seconds``: since the last step in which the request got tokens; 0 for a further token of the same step, which
        is in the histogram no more than with vLLM.
        """
        self._generated.inc()
        if seconds > 0:
            self._between.observe(seconds)

    def drafted(self, drafts: int, accepted: int) -> None:
        """Counts the drafts of a step, and those that became tokens of an answer."""
        self._drafted.inc(drafts)
        self._accepted.inc(accepted)

    def received(self, kv_bytes: int) -> None:
        """Counts the bytes of prompt caches that decode ranks have received."""
        self._kv_bytes.inc(kv_bytes)

    def preempted(self) -> None:
        """Counts a request that has left the batch, and waits again."""
        self._preempted.inc()

    def ended(self, outcome: str, seconds: float = 0.0) -> None:
        """Counts a request that has ended. ``seconds``: since it arrived.

        ``outcome``: "stop", "length", "cancelled", "timeout", "error", or "refused" for one that was never queued.
        """
        self._ended[outcome].inc()
        if outcome in ("stop", "length"):
            self._whole.observe(seconds)

    def side(self, name: str, ranks: Iterable[int]) -> None:
        """Names the side of ``ranks``, "prefill" or "decode"."""
        for rank in ranks:
            self._side.labels(str(rank), name).set(1)

    def memory(self, rank: int, active_bytes: int) -> None:
        """Sets what MLX uses on a rank."""
        self._memory.labels(str(rank)).set(active_bytes)

    def active_memory(self, rank: int) -> int | None:
        """What MLX uses on a rank, as it was last set; None if it never was."""
        value = self._registry.get_sample_value(f"{_NAMESPACE}_active_memory_bytes", {"rank": str(rank)})
        return None if value is None else int(value)

    def counts(self, gauges: Mapping[str, float]) -> dict[str, int]:
        """The counts of requests and tokens that the page shows. ``gauges``: as of :meth:`text`."""
        counters = {
            name: self._registry.get_sample_value(f"{_NAMESPACE}_{name}_total") or 0
            for name in ("generated_tokens", "prompt_tokens", "cached_prompt_tokens", "restarts")
        }
        now = {name: gauges[name] for name in ("running", "queued")}
        return {name: int(value) for name, value in (counters | now).items()}

    def text(self, gauges: Mapping[str, float]) -> str:
        """All metrics. ``gauges``: the values now of those that are gauges, but for memory."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return self._registry.text()


class HttpMetrics:
    """Metrics of the application of HTTP. They go on while ranks restart.

    Args:
        paths: the paths that are served. All others count as "other": a client cannot make series.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = frozenset(paths)
        self._registry = registry = Registry(_NAMESPACE)
        self._requests = registry.counter(
            "http_requests", "Answers of HTTP, by path and status; 499: the client has left.", "path", "status"
        )

    def answered(self, path: str, status: int) -> None:
        """Counts an answer, once its status is known."""
        self._requests.labels(path if path in self._paths else "other", str(status)).inc()

    def text(self) -> str:
        return self._registry.text()
