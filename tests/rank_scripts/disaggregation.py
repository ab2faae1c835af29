"""`mlxdist.serve.Server` with prefill and decode ranks. Scenarios are on rank 0; the other ranks serve.

Arguments: a model folder of tests/support/serving.py, the prefill ranks, the decode ranks, options of ServeOptions as
JSON, and the scenarios.
"""

import contextlib
import http.client
import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import mlxdist
from mlxdist.serve import BatchLimits, HttpOptions, Layout, ServeOptions, Server
from mlxdist.serve.disaggregated_scheduler import DecodeScheduler, PrefillScheduler
from mlxdist.serve.disaggregated_worker import PrefillWorker
from mlxdist.serve.kv_transfers import KVTransfers

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import wait_for

folder, prefill, decode, given, *scenarios = sys.argv[1:]
options = json.loads(given)
ENDLESS = {"logit_bias": {"256": -100}}  # the token that ends an answer
SECONDS = 150  # that end a test which fails


class Client:
    """Asks the server at ``address``."""

    def __init__(self, address: str, server: Server) -> None:
        self.address, self.scheduler = address, server._scheduler
        self.model, self.tokenizer = load(folder)

    def text(self, body: dict[str, Any]) -> str:
        request = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)["choices"][0]["text"]

    @contextlib.contextmanager
    def begun(self, body: dict[str, Any]) -> Iterator[None]:
        """A stream, whose client leaves at the end of the block."""
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
            yield

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=SECONDS) as answer:
            rows = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#"]
        return {name.removeprefix("mlxdist_serve_"): float(value) for name, value in rows}

    def expected(self, body: dict[str, Any]) -> str:
        """The text of mlx-lm on one process."""
        mx.random.seed(body.get("seed", 0))
        sampler, bits = make_sampler(body.get("temperature", 0.0)), options.get("kv_bits")
        cache = [QuantizedKVCache(32, bits) for _ in self.model.layers] if bits else make_prompt_cache(self.model)
        made = stream_generate(
            self.model, self.tokenizer, body["prompt"], body["max_tokens"], sampler=sampler, prompt_cache=cache
        )
        return "".join(response.text for response in made).rstrip("\ufffd")

    def require_expected(self, bodies: list[dict[str, Any]]) -> None:
        expected = [self.expected(body) for body in bodies]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(self.text, bodies))
        assert [text.rstrip("\ufffd") for text in found] == expected, (found, expected)

    def require_empty(self) -> None:
        """Nothing of a request is left on rank 0, and reserved on either side."""
        names = ("running", "queued", "computed", "transfers", "prefill_running", "reserved_tokens")
        assert wait_for(lambda: not any(self.metrics()[name] for name in names), SECONDS), self.metrics()
        assert wait_for(lambda: not self.scheduler._held and not worker()._held, SECONDS)


def worker() -> PrefillWorker:
    (found,) = workers
    return found


workers: list[PrefillWorker] = []


PROMPTS = ["x", "ab", "a question " * 3, "who asks at length " * 9, "who asks at length " * 9 + "and on"]
BODIES: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS]
BODIES += [body | {"temperature": 1.0, "seed": number} for number, body in enumerate(BODIES)]


def answers(client: Client) -> None:
    """Greedy and sampled answers, of prompts of one token, of a chunk and of several, at the same time and again."""
    for _ in range(2):
        client.require_expected(BODIES)
    client.require_empty()


def prefixes(client: Client) -> None:
    """Prefill ranks have the beginnings of prompts in the prefix cache."""
    client.require_expected(BODIES)
    before = client.metrics()
    client.require_expected(BODIES)
    found = client.metrics()
    # All but the last two tokens of each prompt: the last one is computed by decode ranks, and one on prefill ranks.
    cached = sum(max(0, len(body["prompt"]) - 2) for body in BODIES)
    assert found["cached_prompt_tokens_total"] - before["cached_prompt_tokens_total"] == cached
    assert found["kv_bytes_total"] > before["kv_bytes_total"] > 0
    client.require_empty()


def gaps(client: Client) -> None:
    """Streams get a token in each decode step while a long prompt is computed, and also within one of its chunks."""
    steps: list[set[int]] = []  # the requests with a token, of each decode step
    computed: list[tuple[int, int]] = []  # of the long prompt: tokens, and decode steps so far
    deliver, step = DecodeScheduler.deliver, PrefillWorker.step

    def deliver_and_note(self: DecodeScheduler, outcome: Any) -> None:
        steps.append({response.uid for response in outcome.tokens})
        deliver(self, outcome)

    def step_and_wait(self: PrefillWorker, decisions: Any) -> Any:
        outcome = step(self, decisions)
        for response in outcome.prefill:
            if response.progress[1] > 4000:
                begun = len(steps)
                computed.append((response.progress[0], begun))
                wait_for(lambda: len(steps) >= begun + 3 or client.scheduler.unavailable, SECONDS)
                assert len(steps) >= begun + 3, "decode ranks wait for prefill ranks"
        return outcome

    with (
        patch.object(DecodeScheduler, "deliver", deliver_and_note),
        patch.object(PrefillWorker, "step", step_and_wait),
        contextlib.ExitStack() as streams,
    ):
        for number in range(4):
            streams.enter_context(client.begun({"prompt": f"stream {number}", "max_tokens": 4000} | ENDLESS))
        assert wait_for(lambda: bool(steps) and len(steps[-1]) == 4, SECONDS)
        first = len(steps)
        client.text({"prompt": "long " * 800 + "prompt", "max_tokens": 2})
        last = len(steps)
    assert [tokens for tokens, _ in computed] == [*range(512, 4005, 512), 4005]
    assert computed[-1][1] - computed[0][1] >= 3 * 7
    streams_of = set.intersection(*steps[first:last])
    assert len(streams_of) == 4, "a stream has skipped a step"
    client.require_empty()


def left(client: Client) -> None:
    """Clients leave while their prompts are computed, wait for a place on decode ranks, are sent, and are answered."""
    with held(PrefillWorker, "_keep") as chunk, client.begun({"prompt": "long " * 300, "max_tokens": 9}):
        assert wait_for(lambda: client.metrics()["prefill_running"] == 1, SECONDS)
        chunk.wait()
    client.require_empty()
    with client.begun({"prompt": "one", "max_tokens": 4000} | ENDLESS):
        assert wait_for(lambda: client.metrics()["generated_tokens_total"] > 2, SECONDS)
        for _ in range(2):
            with client.begun({"prompt": "two words", "max_tokens": 9}):
                assert wait_for(lambda: client.metrics()["computed"] == 1, SECONDS)
            assert wait_for(lambda: client.metrics()["computed"] == 0 and not worker()._held, SECONDS)
    client.require_empty()
    with held(KVTransfers, "_send") as transfer, client.begun({"prompt": "three words more", "max_tokens": 9}):
        assert wait_for(lambda: client.metrics()["transfers"] == 1, SECONDS)
        transfer.wait()
    client.require_empty()
    client.require_expected([{"prompt": "after all of them", "max_tokens": 9}])


class Held:
    """Calls of a method, which wait until the end of a block."""

    def __init__(self) -> None:
        self.called, self.goes_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        assert self.called.wait(SECONDS)


@contextlib.contextmanager
def held(kind: type, name: str) -> Iterator[Held]:
    own, method = Held(), getattr(kind, name)

    def call(self: Any, *arguments: Any) -> Any:
        own.called.set()
        assert own.goes_on.wait(SECONDS)
        return method(self, *arguments)

    with patch.object(kind, name, call):
        try:
            yield own
        finally:
            own.goes_on.set()


def room(client: Client) -> None:
    """A prompt is kept on prefill ranks until decode ranks have room; one of a higher priority preempts."""
    first = {"prompt": "the first of them", "max_tokens": 40}
    second = {"prompt": "the second of all", "max_tokens": 41}
    client.require_expected([first, second] * 2)
    with ThreadPoolExecutor(1) as threads:
        before = client.metrics()
        low = threads.submit(client.text, first | ENDLESS)
        assert wait_for(lambda: client.metrics()["generated_tokens_total"] > before["generated_tokens_total"], SECONDS)
        urgent = client.text(second | {"priority": -9})
        assert urgent.rstrip("\ufffd") == client.expected(second)
        assert len(low.result()) > 0
    client.require_empty()


def main() -> None:
    layout, limits = Layout(pipeline="pipeline" in options), BatchLimits(**options.get("limits", {}))
    others = {name: value for name, value in options.items() if name not in ("limits", "pipeline")}
    ranks = {name: tuple(map(int, text.split(","))) for name, text in (("prefill", prefill), ("decode", decode))}
    server = Server(
        ServeOptions(
            folder,
            http=HttpOptions(port=0, access_log=False),
            prefill_ranks=ranks["prefill"],
            decode_ranks=ranks["decode"],
            layout=layout,
            limits=limits,
            **others,
        )
    )
    made = PrefillWorker.__init__

    def note(self: PrefillWorker, *arguments: Any) -> None:
        workers.append(self)
        made(self, *arguments)

    with patch.object(PrefillWorker, "__init__", note), server:
        if server.address:
            client = Client(server.address, server)
            assert isinstance(client.scheduler, PrefillScheduler)
            for name in scenarios:
                run: Callable[[Client], None] = globals()[name]
                run(client)
    mlxdist.barrier()


if __name__ == "__main__":
    main()
