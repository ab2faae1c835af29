"""Joins the parts of a server: on every rank the model and the loop, on rank 0 the scheduler and its clients."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_config

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import open_checkpoint
from mlxdist.base.json_reader import parse_json
from mlxdist.base.model_directory import model_directory
from mlxdist.nn.models.load.adapters import CONFIG, WEIGHTS
from mlxdist.nn.models.load.weight_checks import fingerprint
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.default_group import init
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import broadcast_blob
from mlxdist.runtime.operations.collectives import all_gather, broadcast
from mlxdist.version import __version__

from .cluster_status import ClusterStatus
from .decisions import FRAME, MAX_PROMPT, Decisions
from .disaggregated_worker import RemoteDecoder
from .disaggregation import check_ranks, side_of
from .endpoint import Endpoint
from .http_clients import HttpClients
from .loading import load
from .log import say
from .memory import cache_memory
from .metrics import Metrics
from .options import ServeOptions
from .placement import Holding, ModelPlacement, place, show
from .prefix_disk import PrefixDisk
from .preparation_pool import PreparationPool
from .scheduler import Scheduler
from .worker import Worker

__all__ = ["Clients", "Server", "run", "take_signals"]

_HEARTBEAT = 1.0  # seconds
_TOKENIZER_SECONDS = 30.0  # that a process may take to have its tokenizer before the server is ready
_THREAD_END = 10.0  # seconds
_POSITIONS = ("max_position_embeddings", "n_positions")  # the second is GPT-2's
_CONTEXT = 1 << 15  # tokens, where config.json does not say


class Clients(Protocol):
    """A source of requests, on rank 0."""

    def listening(self) -> AbstractContextManager[None]:
        """A context in which requests arrive."""

    def ready(self, name: str, ranks: int, layout: str) -> None:
        """Called when requests begin to be served, by the model ``name`` on that number of ranks with that layout."""

    def interrupt(self) -> None:
        """Called for SIGINT."""

    def failed(self) -> None:
        """Called when the server fails, after each request has its reason. Returns once clients had time to read it."""


class Server:
    """A server of one model of mlx-lm, sharded over all ranks of a job: `mlxdist serve`, for programs.

    Every rank makes one with the same options. Rank 0 listens; the others compute with it. It is used once, in one of
    two ways::

        Server(options).run()  # until rank 0 gets SIGINT or SIGTERM

        with Server(options) as server:  # in a thread, until rank 0 leaves the block
            ...

    Args:
        options: the options of the server.

    Raises:
        InvalidArgument: from ``run`` and ``with``, on all ranks: there is no such model, or it cannot be sharded as
            asked, or batched; the draft model has other tokens; rank 0 cannot listen at the address.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._address = ""
        self._scheduler: Scheduler | None = None
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def address(self) -> str:
        """The URL at which rank 0 answers; empty on other ranks, and before it listens."""
        return self._address

    def run(self) -> int:
        """Serves until rank 0 gets SIGINT or SIGTERM. Every rank calls it, in its main thread.

        Returns:
            The exit status: 0 after SIGTERM, 130 after SIGINT.

        Raises:
            PeerLost, Timeout, Mismatch, Aborted, TransportError: a rank has died, or the ranks no longer agree. Rank 0
                has ended all requests with the reason.
        """
        received: list[int] = []
        run("serve", self._options, self._listen, partial(take_signals, received, self._options.drain))
        return 130 if received[:1] == [signal.SIGINT] else 0

    def __enter__(self) -> "Server":
        """Serves in a thread, from when this returns. No other thread may use the group of ``mlxdist.init()``
        meanwhile.

        Raises what ``run`` raises.
        """
        init()  # in this thread: that of the signals
        self._thread = threading.Thread(target=self._serve, name="mlxdist server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all requests, and the server on all ranks. On ranks other than 0 it waits until rank 0 does that.

        Raises what ``run`` raises, if the server has failed. A second call does nothing.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._scheduler is not None:
            self._scheduler.stop()
        thread.join()
        # MLX frees what it has compiled in a thread when that ends, for which it takes Python's lock; join() returns
        # before. A program that ends meanwhile is aborted: Python ends the thread by an exception that C++ stops.
        task, deadline = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + _THREAD_END
        while task.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            run("serve", self._options, self._listen, self._has_started)
        except BaseException as error:  # for the thread that closes this
            self._error = error
        finally:
            self._started.set()

    def _has_started(self, scheduler: Scheduler | None, clients: "Clients | None") -> None:
        self._scheduler = scheduler
        self._started.set()

    def _listen(self, endpoint: Endpoint) -> HttpClients:
        clients = HttpClients(endpoint, self._options)
        self._address = clients.address
        return clients


def run(
    name: str,
    options: ServeOptions,
    clients_of: Callable[[Endpoint], Clients],
    has_started: Callable[[Scheduler | None, Clients | None], None],
) -> None:
    """Loads the model and serves clients, which rank 0 makes, until the scheduler stops. Raises as :class:`Server`.

    ``has_started``: called once requests are served, with the scheduler and the clients on rank 0.
    """
    group = init()
    with agreed(name, group, options):  # the key is not in its repr
        options.check()
        check_ranks(options, group.size())
    side = side_of(options, group)
    with agreed(name, group):
        has_model = group.rank() == 0 or not options.stream_weights
        directory = model_directory(options.model) if has_model else Path()
        context = _context(directory, options) if has_model else 0  # rank 0's counts
        is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", options.model) and not Path(options.model).exists()
        own_name = Path(os.path.abspath(directory)).name if has_model else ""  # also of "."
        served = (options.model if is_name else own_name, options.model, "default_model")
        adapters = tuple(adapter for adapter, _ in options.adapters)
        if taken := set(adapters) & set(served):
            raise InvalidArgument(f"serve: {min(taken)} is the name of the model, and cannot be that of an adapter")
        disk = None
        if options.prompt_cache_dir and side.has_prefix_cache:
            disk = PrefixDisk(options.prompt_cache_dir, options.prompt_cache_disk, side.group)
        clients = endpoint = None
        if group.rank() == 0:
            pool = PreparationPool(directory, options.chat_template_args)
            defaults = {"max_tokens": 512, "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | options.defaults
            metrics = Metrics(Environment.read().restart_count)
            endpoint = Endpoint(pool, served, adapters, defaults, options.http.request_timeout, metrics)
            clients = clients_of(endpoint)
    with contextlib.nullcontext() if clients is None else clients.listening():
        with side.loading(name):
            demands = options.demands(side.limits, side.neighbors)
            placement = place(directory, side.group, side.layout, demands)
            holdings: list[Holding] = []
            hold = lambda report: holdings.extend(show(placement, report, side.group))
            model, tokenizer = load(options, directory, placement, side.group, hold, side.inspect)
            with agreed(name, side.group):
                worker = side.worker(model, tokenizer)
            with agreed(name, side.own):  # a rank that cannot go on ends no rank that has not yet seen that
                vocabulary = worker.warm_up()
            limits = side.limits
            requests, chunk = limits.decode_concurrency, limits.prefill_step_size
            memory = cache_memory(model, requests, chunk, side.group, limits.max_total_tokens, side.neighbors)
            worker.limit(memory)
        tokens = side.connect(worker, memory.tokens)
        if disk is not None:
            stored = worker.open_disk(disk, disk.open(_identity(options, directory, placement, side.group)), side.own)
            if group.rank() == 0 and stored:
                say(f"the prefix cache has {stored} parts of prompts and answers on disk")
        scheduler = None
        if clients is not None and endpoint is not None:
            timeout = side.own.timeout
            # The other ranks wait in a broadcast with a deadline: rank 0 of an idle server must send before it.
            heartbeat = min(_HEARTBEAT, (timeout or 4 * _HEARTBEAT) / 4)
            # It was started before the model was loaded. The other ranks wait in a barrier with a deadline.
            endpoint.wait_for_tokenizer(min(_TOKENIZER_SECONDS, (timeout or 2 * _TOKENIZER_SECONDS) / 2))
            scheduler = side.scheduler(options, heartbeat, endpoint.metrics, memory.tokens)
            gauges = partial(_gauges, scheduler, worker, endpoint.metrics)
            cluster = ClusterStatus(served[0], placement.name, holdings, memory.limits, endpoint.metrics, gauges)
            endpoint.open(scheduler, tokenizer, vocabulary, min(context, tokens), gauges, cluster)
        has_started(scheduler, clients)
        try:
            side.job.barrier()  # who reads that the server is ready may stop it, and all ranks have to take the signal
            if clients is not None:
                clients.ready(served[0], group.size(), placement.name)
            side.run(_loop, worker, scheduler)
        except Exception as error:
            if scheduler is not None and clients is not None:
                scheduler.fail(str(error))
                clients.failed()
            raise
        worker.close()
        if disk is not None:
            disk.close()


def _loop(group: Group, worker: Worker | RemoteDecoder, scheduler: Scheduler | None) -> None:
    """Runs steps on all ranks until rank 0 decides to stop: one broadcast, and one step of the model if there is work.

    Ranks wait for each other in the broadcast, on the CPU, and never in the work of a GPU.
    """
    step, size = 0, FRAME
    while True:
        message = np.zeros(size, np.uint8)
        if scheduler is not None:
            message = np.frombuffer(scheduler.decide(step, size, worker.digest).encode(size), np.uint8)
        decisions = Decisions.decode(broadcast(message, group=group).tobytes())
        if decisions.stop:
            worker.end(decisions.end)
            return
        outcome = worker.step(decisions)
        if scheduler is not None:
            scheduler.deliver(outcome)
        if decisions.reports:
            reports = all_gather(worker.report(), group=group).reshape(group.size(), -1)
            worker.compare(reports)
            if scheduler is not None:
                scheduler.report(reports[:, 0].tolist())
        step, size = (step + 1) % 2**32, decisions.next_size


def take_signals(received: list[int], drain: float, scheduler: Scheduler | None, clients: Clients | None) -> None:
    """Adds the SIGINT and SIGTERM that come from now on to ``received``. Rank 0 decides what follows; the launcher
    signals all ranks. SIGTERM gives requests ``drain`` seconds to end.

    The handlers stay: the process ends after the loop, and a further signal must not turn that into a failure.
    """

    def take(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if clients is not None and number == signal.SIGINT:
            clients.interrupt()
        elif scheduler is not None:
            scheduler.stop(drain)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, take)


def _identity(options: ServeOptions, directory: Path, placement: ModelPlacement, group: Group) -> dict[str, str]:
    """Returns what keys and values on disk depend on beside tokens. Collective: rank 0 alone may have the models."""
    found: dict[str, str] = {}
    if group.rank() == 0:
        adapters = [Path(path) for path in (*(path for _, path in options.adapters), options.adapter_path) if path]
        plans = replace(placement, reason="").to_json()  # figures in a reason change with each measurement
        found = {
            "model": fingerprint(open_checkpoint(directory)),
            "draft model": "" if options.draft_model is None else _draft_model(options),
            "--mtp": str(options.mtp),
            "adapters": ("named " if options.adapters else "") + _digest_of_adapters(adapters),
            "plan of shards": hashlib.blake2b(plans.encode(), digest_size=16).hexdigest(),
            "--kv-bits or --kv-group-size": str((options.kv_bits, options.kv_group_size)),
            "version of mlx-lm": version("mlx-lm"),
            "version of mlxdist": __version__,
        }
    parsed: dict[str, str] = parse_json(broadcast_blob(json.dumps(found).encode(), group))
    return parsed


def _draft_model(options: ServeOptions) -> str:
    assert options.draft_model is not None
    sharded = "sharded " if options.shard_draft_model else ""
    return sharded + fingerprint(open_checkpoint(model_directory(options.draft_model)))


def _digest_of_adapters(directories: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for directory, name in itertools.product(directories, (CONFIG, WEIGHTS)):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _context(directory: Path, options: ServeOptions) -> int:
    """The maximum number of tokens of a prompt and its answer. Drafts extend beyond it, and must have positions, too.

    Raises:
        InvalidArgument: no token is left.
    """
    config = load_config(directory)
    levels = (
        [level[name] for name in _POSITIONS if level.get(name)] for level in (config, config.get("text_config", {}))
    )
    found = next((min(level) for level in levels if level), None)
    most = min(options.max_context or found or _CONTEXT, MAX_PROMPT)
    if found and most <= found:
        most = min(most, found - options.limits.num_draft_tokens)
    if most < 2:
        raise InvalidArgument(f"serve: the model has {found} positions; lower --num-draft-tokens")
    return most


def _gauges(scheduler: Scheduler, worker: Worker, metrics: Metrics) -> dict[str, float]:
    metrics.memory(0, mx.get_active_memory())  # that of the other ranks is as they last reported it
    cache = worker.cache
    return scheduler.gauges() | {
        "prefix_cache_tokens": cache.tokens,
        "prefix_cache_snapshots": cache.states,
        "prefix_cache_disk_bytes": cache.disk_bytes,
    }
