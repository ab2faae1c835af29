"""What the tests of `mlxdist serve` share: a tiny model with a tokenizer, and a server of it as a process."""

import contextlib
import http.client
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path

import mlx.core as mx
import tiny_models
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load, stream_generate
from mlx_lm.generate import make_text_state_machine
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, save_config, save_model

from mlxdist.serve.answer import Answer
from mlxdist.serve.decisions import Admission
from mlxdist.tools.bench.byte_model import byte_tokenizer, save_byte_tokenizer

TEMPLATE = "{% for message in messages %}<|message|>{{ message['content'] }}{% endfor %}<|message|>"
VOCABULARY = 259  # a token for every byte, one for the end, two of the template
CONTEXT = 512
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "MLX_DISABLE_COMPILE": "1",  # on CPUs MLX calls a C++ compiler for every fused kernel
    "MLX_MPI_LIBNAME": "not-installed.so",  # Open MPI would leave a session directory
    "MLXDIST_FLIGHT_DIR": "none",
    "MLXDIST_TUNING_FILE": "none",
    "PYTHONUNBUFFERED": "1",
}
PLAIN = Admission(
    7,
    [1, 2, 3],
    [3],
    5,
    2**64 - 1,
    SamplingArguments(0.7, 1.0, 0, 0.0, 0.0, 0.1),
    LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
)


def save_model_folder(
    folder: Path, kind: str = "qwen3", seed: int = 1, bits: int | None = None, **fields: object
) -> Path:
    """A folder of mlx-lm with random weights, so large that the answer depends on the question."""
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False} | fields
    config = tiny_models.config_of(kind)
    if isinstance(config.get("text_config"), dict):
        fields |= {"text_config": config["text_config"] | fields}
    model = tiny_models.build(kind, seed=seed, **fields)
    model.update(tree_map(lambda array: array * 2, model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        fields["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(config | fields, folder / "config.json")
    save_byte_tokenizer(folder, "<|end|>", ["<|message|>", "<|tool|>"], TEMPLATE)
    return folder


def save_adapters(folder: Path, model: Path, seed: int, layers: int = -1, **settings: object) -> Path:
    """What mlx-lm's lora training leaves, with random matrices. ``layers``: the last ones; -1 for all."""
    loaded, _ = load_model(model)
    settings = {"rank": 4, "scale": 2.0, "dropout": 0.1} | settings
    loaded.freeze()
    linear_to_lora_layers(loaded, layers, settings)
    mx.random.seed(seed)
    values = {name: mx.random.normal(a.shape) * 0.1 for name, a in tree_flatten(loaded.trainable_parameters())}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), values)
    config = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def answer_of(*stop: str) -> Answer:
    """An answer with stop words, and with the tokenizer of :func:`save_model_folder`."""
    tokenizer = TokenizerWrapper(byte_tokenizer("<|end|>"), BPEStreamingDetokenizer)
    return Answer(tokenizer.detokenizer, make_text_state_machine(tokenizer), "normal", stop)


def post(body: object, path: str = "/v1/completions") -> bytes:
    """A request as its bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def random_request(generator: random.Random) -> dict:
    """Of /v1/completions; with a seed where it is sampled."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    body: dict[str, object] = {"prompt": " ".join(generator.choices(words, k=generator.choice([1, 3, 9, 40])))}
    body["max_tokens"] = generator.choice([1, 5, 24])
    if generator.random() < 0.5:
        body |= {"temperature": generator.choice([0.5, 1.0]), "seed": generator.getrandbits(64)}
        body |= {"top_p": generator.choice([0.9, 1.0])}
    if generator.random() < 0.3:
        body["repetition_penalty"] = 1.2
    if generator.random() < 0.3:
        body["stop"] = [chr(generator.randrange(97, 123)), "never said"]
    if generator.random() < 0.3:
        body["logit_bias"] = {str(generator.randrange(256)): generator.uniform(-5, 5)}
    return body


def require_answers(
    folder: Path,
    ranks: int,
    *options: object,
    make_cache: Callable[[nn.Module], list] = make_prompt_cache,
    **variables: str,
) -> list[str]:
    """A server answers as mlx-lm on one process: requests at the same time, with places for some of them; and again,
    from the prefix cache. Returns what it has printed. ``variables``: of its environment."""
    model, tokenizer = load(str(folder))
    prompts = [f"{number} question of a client" + " who asks at length" * (number % 4) for number in range(8)]
    expected = []
    for prompt in prompts:
        made = stream_generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=make_cache(model))
        expected.append("".join(response.text for response in made).rstrip("\ufffd"))
    options = ("--decode-concurrency", 3, "--prefill-step-size", 16, *options)
    with ServerProcess(folder, ranks, *options, **variables) as server, ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            found = list(threads.map(lambda prompt: server.text(prompt, 20), prompts))
            assert [text.rstrip("\ufffd") for text in found] == expected
        assert server.metrics()["cached_prompt_tokens_total"] > 0
        assert server.stop() == 0, "".join(server.lines)
    return server.lines


class ServerProcess:
    """`mlxdist serve` with a number of ranks; ready once it is made.

    Attributes:
        address: such as http://127.0.0.1:1234.
        lines: what it has printed so far.
    """

    def __init__(
        self,
        model: Path | str,
        ranks: int = 1,
        *options: object,
        cwd: Path | None = None,
        restarts: int | None = None,
        before: Sequence[object] = (),
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """With ``restarts``, or words that come ``before`` the command of a rank, by `mlxdist launch`.

        ``prefix``: words that come before all, of a command that runs the others.
        """
        command = [sys.executable, "-P", "-m", "mlxdist", "serve", model, "--port", 0, *options]
        if restarts is not None or before:
            command = [*command[:4], "launch", "-n", ranks, "--max-restarts", restarts or 0, "--", *before, *command]
        elif ranks > 1:
            command += ["-n", ranks]
        self.ranks = ranks
        self.name = uuid.uuid4().hex  # by which its processes are found
        environment = ENVIRONMENT | {"SERVER": self.name}
        self.process = subprocess.Popen(
            [*prefix, *map(str, command)],
            env=environment | variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        found: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(found,), daemon=True)
        self._reader.start()
        self.address = found.get(timeout=90) or ""
        assert self.address, "".join(self.lines)

    def _read(self, found: queue.Queue) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(r"is ready at (http://[^\s,]+)[^,]*, ranks:", line):
                found.put(match[1])
        found.put(None)

    @property
    def where(self) -> tuple[str, int]:
        host, port = self.address.removeprefix("http://").split(":")
        return host, int(port)

    def ask(self, body: object, path: str = "/v1/completions", timeout: float = 60, **headers: str) -> dict:
        """The answer to a request, or for a body of None to a GET."""
        status, answer, _ = self.request(body, path, timeout, **headers)
        assert status == 200, answer
        return answer

    def request(
        self, body: object, path: str = "/v1/completions", timeout: float = 60, **headers: str
    ) -> tuple[int, dict, Message]:
        """Status, answer and headers. A body of bytes is sent as it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"} | headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.load(response), response.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), error.headers

    def stream(self, body: dict, path: str = "/v1/completions") -> list[str]:
        """The events of a streamed answer, without those that only keep the connection."""
        lines = self.stream_text(body, path).splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    def stream_text(self, body: dict, path: str) -> str:
        """The whole text of a streamed answer."""
        connection = http.client.HTTPConnection(*self.where, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
            return connection.getresponse().read().decode()

    @contextlib.contextmanager
    def raw(self, data: bytes) -> Iterator[socket.socket]:
        """A connection to which these bytes have been sent."""
        with socket.create_connection(self.where, timeout=30) as connection:
            connection.sendall(data)
            yield connection

    def text(self, prompt: str, max_tokens: int = 12, **fields: object) -> str:
        answer = self.ask({"prompt": prompt, "max_tokens": max_tokens} | fields)
        return answer["choices"][0]["text"]

    def metrics(self, **headers: str) -> dict[str, float]:
        request = urllib.request.Request(self.address + "/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            rows = [line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#"]
        return {name.removeprefix("mlxdist_serve_"): float(value) for name, value in rows}

    def pids(self) -> list[int]:
        """The processes of the ranks, of each its own."""
        if self.ranks == 1:
            return [self.process.pid]
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if f"SERVER={self.name}".encode() in variables:
                    for rank in range(self.ranks):
                        if f"MLXDIST_RANK={rank}".encode() in variables:
                            found[rank] = int(folder.name)
        return [found[rank] for rank in range(self.ranks)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
