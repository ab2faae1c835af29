"""What the tests of `mlxdist serve` share: a tiny model with a tokenizer, and a server of it as a process."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import tiny_models
from mlx.utils import tree_map
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxdist.serve.decisions import Admission

TEMPLATE = "{% for message in messages %}<|message|>{{ message['content'] }}{% endfor %}<|message|>"
VOCABULARY = 259  # a token for every byte, one for the end, two of the template
CONTEXT = 512
PLAIN = Admission(
    7,
    [1, 2, 3],
    [("user", 3)],
    5,
    2**64 - 1,
    SamplingArguments(0.7, 1.0, 0, 0.0, 0.0, 0.1),
    LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
)


def save_model_folder(folder: Path, kind: str = "qwen3", **fields: object) -> Path:
    """A folder of mlx-lm with random weights, so large that the answer depends on the question."""
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False} | fields
    model = tiny_models.build(kind, seed=1, **fields)
    model.update(tree_map(lambda array: array * 2, model.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(tiny_models.config_of(kind) | fields, folder / "config.json")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "<|message|>", "<|tool|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "additional_special_tokens": ["<|message|>", "<|tool|>"]}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    return folder


class ServerProcess:
    """`mlxdist serve` with a number of ranks; ready once it is made.

    Attributes:
        address: such as http://127.0.0.1:1234.
        lines: what it has printed so far.
    """

    def __init__(self, model: Path, ranks: int = 1, *options: object, **variables: str) -> None:
        command = [sys.executable, "-m", "mlxdist", "serve", model, "--port", 0, *options]
        command += ["-n", ranks] if ranks > 1 else []
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "MLX_DISABLE_COMPILE": "1",  # on CPUs MLX calls a C++ compiler for every fused kernel
            "MLX_MPI_LIBNAME": "not-installed.so",  # Open MPI would leave a session directory
            "MLXDIST_FLIGHT_DIR": "none",
            "MLXDIST_TUNING_FILE": "none",
            "PYTHONUNBUFFERED": "1",
        }
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=environment | variables,
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
            if match := re.search(r"is ready at (http://\S+)", line):
                found.put(match[1])
        found.put(None)

    def ask(self, body: object, path: str = "/v1/completions", timeout: float = 60, **headers: str) -> dict:
        """The answer to a request, or for a body of None to a GET."""
        status, answer, _ = self.request(body, path, timeout, **headers)
        assert status == 200, answer
        return answer

    def request(
        self, body: object, path: str = "/v1/completions", timeout: float = 60, **headers: str
    ) -> tuple[int, dict, dict[str, str]]:
        """Status, answer and headers. A body of bytes is sent as it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"} | headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.load(response), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), dict(error.headers)

    def text(self, prompt: str, max_tokens: int = 12, **fields: object) -> str:
        answer = self.ask({"prompt": prompt, "max_tokens": max_tokens} | fields)
        return answer["choices"][0]["text"]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.address + "/metrics", timeout=20) as response:
            rows = [line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#"]
        return {name.removeprefix("mlxdist_serve_"): float(value) for name, value in rows}

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
