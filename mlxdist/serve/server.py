"""Joins the parts of a server: on every rank the model and the loop, on rank 0 HTTP and the scheduler."""

import contextlib
import re
import signal
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from mlx_lm.utils import load_config

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.model_directory import model_directory
from mlxdist.nn.rank_checks import agreed
from mlxdist.nn.sharding.load import LoadReport, load_sharded
from mlxdist.runtime.default_group import init
from mlxdist.runtime.group import Group
from mlxdist.runtime.ops import broadcast

from .decisions import FRAME, MAX_PROMPT, Decisions
from .frontend import Frontend
from .http import Server
from .listener import is_local, listen, listen_for_proxy
from .scheduler import Scheduler, say
from .worker import BatchLimits, Worker

__all__ = ["ServeOptions", "serve"]

_HEARTBEAT = 1.0  # seconds
_FAREWELL = 2.0  # seconds that /health has the reason of a failure, and streams the time to send it; without a proxy
_CONTEXT = 1 << 15  # tokens, where config.json does not say


@dataclass(frozen=True)
class ServeOptions:
    """What `mlxdist serve` is given.

    Attributes:
        model: a directory, or the name of a model that `hf download` has fetched.
        host, port: where rank 0 listens; port 0 is a free one.
        proxy: the address of the launcher's proxy; rank 0 then listens for it alone. Empty for none.
        pipeline: whether ranks are stages, which have layers each, instead of a shard of each layer.
        limits: of the batch.
        max_queue: requests that wait; more get 429.
        request_timeout: seconds of a request, from its arrival.
        max_context: tokens of a prompt and its answer; None for what the model's config.json says.
        defaults: of a request's max_tokens, temp, top_p, top_k and min_p, as mlx_lm.server's options are called.
        chat_template_args: variables of the chat template.
        allowed_origins: of web pages that may use it; "*" for all.
        api_key: that clients send; empty for none.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8080
    proxy: str = ""
    pipeline: bool = False
    limits: BatchLimits = BatchLimits()
    max_queue: int = 256
    request_timeout: float = 600.0
    max_context: int | None = None
    defaults: dict[str, float] = field(default_factory=dict)
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    allowed_origins: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)


def serve(options: ServeOptions) -> int:
    """Serves until rank 0 gets SIGINT or SIGTERM. Every rank calls it, in its main thread; only rank 0 listens.

    Returns:
        The exit status: 0 after SIGTERM, 130 after SIGINT.

    Raises:
        InvalidArgument: there is no such model, or it cannot be sharded or batched; the address cannot be listened at.
            On all ranks.
        PeerLost, Timeout, Mismatch, Aborted, TransportError: a rank has died, or the ranks no longer agree. Rank 0
            has ended all requests with the reason.
    """
    group = init()
    own = group.split(0)  # decisions have an order of their own: MLX computes a token ahead in the other
    assert own is not None  # the color is not negative
    with agreed("serve", group, options):  # the key is not in its repr
        directory = model_directory(options.model)
        context = _context(directory, options.max_context)
        is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", options.model) and not Path(options.model).exists()
        served = (options.model if is_name else directory.name, options.model, "default_model")
        frontend = Frontend(_mlx_lms(options), served, options.request_timeout, options.api_key)
        http = _listen(options, frontend) if group.rank() == 0 else None
        frontend.metrics.add("restarts_total", Environment.read().restart_count)
    with contextlib.nullcontext() if http is None else http.listening():
        stages = group.size() if options.pipeline else 1
        model, tokenizer = load_sharded(directory, group, pp=stages, on_report=lambda report: _report(report, group))
        with agreed("serve", group):
            if tokenizer is None:
                raise InvalidArgument(f"serve: {directory} has no tokenizer")
            worker = Worker(model, tokenizer, options.limits)
        vocabulary = worker.warm_up()
        scheduler = None
        if http is not None:
            heartbeat = min(_HEARTBEAT, (own.timeout or 4 * _HEARTBEAT) / 4)
            scheduler = Scheduler(
                options.limits.decode_concurrency, options.max_queue, heartbeat, tokenizer, frontend.metrics
            )
            frontend.open(scheduler, tokenizer, vocabulary, context, lambda: _gauges(scheduler, worker))
            say(f"{served[0]} is ready at {http.address}, ranks: {group.size()}")
        try:
            received = _loop(own, worker, scheduler)
        except Exception as error:
            if scheduler is not None and http is not None:
                scheduler.fail(str(error))
                if options.proxy:  # it has the requests, and says why: the sooner this ends, the better
                    http.last_seconds = 0.0
                else:
                    time.sleep(_FAREWELL)
            raise
        worker.close()
    return 130 if received == signal.SIGINT else 0


def _loop(group: Group, worker: Worker, scheduler: Scheduler | None) -> int:
    """All ranks: one broadcast, and one step of the model if there is something to do. Returns the signal that ends it.

    Ranks wait for each other in the broadcast, on the CPU, and never in the work of a GPU.
    """
    step, size = 0, FRAME
    received = _take_signals(scheduler)
    while True:
        message = np.zeros(size, np.uint8)
        if scheduler is not None:
            message = np.frombuffer(scheduler.decide(step, size, worker.digest).encode(size), np.uint8)
        decisions = Decisions.decode(broadcast(message, group=group).tobytes())
        if decisions.stop:
            return received[0] if received else 0
        outcome = worker.step(decisions)
        if scheduler is not None:
            scheduler.deliver(outcome)
        step, size = (step + 1) % 2**32, decisions.next_size


def _take_signals(scheduler: Scheduler | None) -> list[int]:
    """The SIGINT and SIGTERM that come from now on. Rank 0 decides to stop then; the launcher signals all ranks.

    They stay taken: the process ends after the loop, and more of them must not make a failure of that.
    """
    received: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if scheduler is not None:
            scheduler.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, take)
    return received


def _listen(options: ServeOptions, frontend: Frontend) -> Server:
    listener = listen_for_proxy() if options.proxy else listen(options.host, options.port)
    server = Server(listener, frontend, options.proxy)
    if not options.api_key and not is_local(server.address):
        say(f"all who reach {server.address} can use the model; MLXDIST_API_KEY sets a key")
    return server


def _mlx_lms(options: ServeOptions) -> Namespace:
    """Of mlx_lm.server's options, those that its handler reads; with its defaults."""
    defaults = {"max_tokens": 512, "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | options.defaults
    origins, template = list(options.allowed_origins), options.chat_template_args
    return Namespace(num_draft_tokens=0, allowed_origins=origins, chat_template_args=template, **defaults)


def _context(directory: Path, given: int | None) -> int:
    config = load_config(directory)
    found = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return min(given or found or _CONTEXT, MAX_PROMPT)


def _gauges(scheduler: Scheduler, worker: Worker) -> dict[str, float]:
    return scheduler.gauges() | {"prefix_cache_tokens": worker.cache.tokens}


def _report(report: LoadReport, group: Group) -> None:
    held, total = report.bytes_held / 1e9, report.bytes_total / 1e9
    say(f"rank {group.rank()} holds {held:.2f} of {total:.2f} GB of weights, loaded in {report.seconds:.1f} s")
