"""mlx-lm's commands under `mlxdist launch`, unmodified and by `mlxdist.lm`: they compute what one process computes."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import mlx.core as mx
import pytest
from bpe_models import save_bpe_model_folder
from launching import LAUNCH, Terminal, nothing_left  # noqa: F401
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes, save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waiting import wait_for

import mlxdist
from mlxdist import lm

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# All but the first are models that mlx-lm's own sharded_load cannot sharded over 2 or 3 ranks.
KINDS = {
    "llama": {},
    "qwen2": {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96},  # shard(), one KV head
    "gemma": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16},
    "mixtral": {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "num_local_experts": 4},
}
TEMPLATE = "{% for message in messages %}<|message|>{{ message['content'] }}{% endfor %}"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a model of random weights, and a tokenizer with a token for every byte."""
    return save(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A function: the same, of one of KINDS, with larger weights, so that the answer depends on the question."""
    directory = tmp_path_factory.mktemp("models")

    def saved(kind):
        return save(directory / kind, CONFIG | {"model_type": kind, "intermediate_size": 192} | KINDS[kind], 3)

    return saved


def save(directory, config, scale=1):
    mx.random.seed(1)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(lambda weights: weights * scale, model.parameters()))
    directory.mkdir(exist_ok=True)
    save_model(directory, model)
    save_config(dict(config), directory / "config.json")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "<|message|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "additional_special_tokens": ["<|message|>"]}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch):
    """On CPUs MLX calls a C++ compiler for every fused kernel, which takes longer than all that is tested here."""
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def no_open_mpi(monkeypatch):
    """Where Open MPI is installed, MLX opens it in a process without a launcher, and that leaves a session directory in
    TMPDIR. `mlxdist launch` names its own library to the ranks."""
    monkeypatch.setenv("MLX_MPI_LIBNAME", "not-installed.so")


def mlx_lm(*arguments, ranks=1, typed="", cwd=None, module="mlx_lm"):
    """What it prints; on one rank without the launcher."""
    command = [*(LAUNCH if ranks > 1 else []), *(["-n", str(ranks), "--"] if ranks > 1 else [])]
    command += [sys.executable, "-m", module, *map(str, arguments)]
    job = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def lines(text):
    """Without prefixes, colours and what is measured."""
    found = [ESCAPES.sub("", line).replace("[0] ", "").rstrip() for line in text.splitlines()]
    return [line for line in found if not any(word in line for word in ("tok/s", "tokens-per-sec", "Peak memory"))]


@pytest.mark.long
@pytest.mark.parametrize("parallel", [[], pytest.param(["--pipeline"], marks=pytest.mark.long)])
def test_chat(model, parallel):
    """Two turns; every rank reads them from the standard input."""
    arguments = ["chat", "--model", model, "--max-tokens", 8, "--temp", 0]
    two = mlx_lm(*arguments, *parallel, ranks=2, typed="hello\nand you?\nq\n")
    assert "[1]" not in two
    assert two.count("8 tokens ·") == 2 and lines(two)[-1] == "bye"
    assert lines(two) == lines(mlx_lm(*arguments, typed="hello\nand you?\nq\n"))


@pytest.mark.parametrize(
    "kind, ranks",
    [("gemma", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in [("qwen2", 2), ("mixtral", 3)])],
)
def test_chat_of_mlxdist_lm(saved_model, kind, ranks):
    same_chat(saved_model(kind), ranks)


@pytest.mark.long
def test_pipeline_of_mlxdist_lm(saved_model):
    """Of a model that has no pipeline in mlx-lm."""
    same_chat(saved_model("gemma"), 2, "--pipeline")


def same_chat(path, ranks, *parallel):
    arguments = ["chat", "--model", path, "--max-tokens", 8, "--temp", 0]
    found = mlx_lm(*arguments, *parallel, ranks=ranks, typed="hello\nand you?\nq\n", module="mlxdist.lm")
    assert found.count(" tokens ·") == 2
    assert lines(found) == lines(mlx_lm(*arguments, typed="hello\nand you?\nq\n"))


@pytest.mark.long
@pytest.mark.parametrize("kind, ranks", [("llama", 2), ("gemma", 3)])
def test_generate_of_mlxdist_lm(saved_model, kind, ranks):
    arguments = ["generate", "--model", saved_model(kind), "--prompt", "hello", "--max-tokens", 8]
    found = mlx_lm(*arguments, ranks=ranks, module="mlxdist.lm")
    assert "Generation: " in found and not re.search(r"\[[12]\]", found)
    assert lines(found) == lines(mlx_lm(*arguments))


# After `generate` has drawn its tokens: the state of the generator that they came from.
DRAWN = "import mlx.core as mx, mlxdist.lm; mlxdist.lm.main(); print('seed', mx.random.state[0].tolist(), flush=True)"


@pytest.mark.long
def test_generate_draws_the_same_tokens_on_all_ranks_without_a_seed(saved_model):
    command = [*LAUNCH, "-n", "2", "--", sys.executable, "-c", DRAWN, "generate", "--temp", "1", "--max-tokens", "4"]
    command += ["--model", str(saved_model("gemma")), "--prompt", "hello"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    first, second = re.findall(r"seed (.*)", job.stdout)
    assert first == second


def test_generate_of_mlxdist_lm_rejects_quantized_activations():
    with pytest.raises(mlxdist.InvalidArgument, match="--quantize-activations is for one rank"):
        lm.load("model", return_config=True, model_config={"quantize_activations": True})


@pytest.mark.long
@pytest.mark.parametrize("where", [["-n", "2"], ["--hosts", "localhost", "-n", "2"]])
def test_chat_on_a_terminal(model, where):
    command = [sys.executable, "-m", "mlx_lm", "chat", "--model", str(model), "--max-tokens", "8", "--temp", "0"]
    terminal = Terminal(*where, "--", *command)
    for turn, typed in enumerate((b"hello\n", b"and you?\n", b"q\n"), 1):
        terminal.read_until("›".encode(), 60, times=turn)
        terminal.type(typed)
    assert terminal.finish(30) == 0
    assert terminal.text.decode(errors="replace").count("8 tokens ·") == 2 and b"bye" in terminal.text


@pytest.mark.long
@pytest.mark.parametrize(
    "module, parallel",
    [("mlx_lm", []), ("mlx_lm", ["--pipeline"]), ("mlx_lm", ["--batch-size", 2]), ("mlxdist.lm", ["--pipeline"])],
)
def test_benchmark(model, module, parallel):
    sizes = ["--prompt-tokens", 16, "--generation-tokens", 8, "--num-trials", 2]
    printed = mlx_lm("benchmark", "--model", model, *sizes, *parallel, ranks=2, module=module)
    assert re.search(r"^\[0\] Averages: prompt_tps=[1-9][\d.]+, generation_tps=[1-9]", printed, re.MULTILINE)
    assert printed.count("Trial") == 2 and "[1]" not in printed


@pytest.mark.long
def test_share(tmp_path, model):
    """Rank 0 has a directory, the other one gets it."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    shared = tmp_path / "0" / "model"
    shutil.copytree(model, shared)
    (shared / "more").mkdir()
    (shared / "more" / "bytes").write_bytes(os.urandom(1_000_003))
    (shared / "link").symlink_to("config.json")
    program = f'cd "$0/$MLXDIST_RANK" && exec {sys.executable} -m mlx_lm share --path model --dst model --tmpdir .'
    job = subprocess.run([*LAUNCH, "-n", "2", "--", "sh", "-c", program, tmp_path], capture_output=True, timeout=60)
    assert job.returncode == 0, job.stderr
    got = tmp_path / "1" / "model"
    assert (got / "link").is_symlink()
    assert {p.relative_to(got): p.is_file() and p.read_bytes() for p in got.rglob("*")} == {
        p.relative_to(shared): p.is_file() and p.read_bytes() for p in shared.rglob("*")
    }


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lora(tmp_path, model, accumulate):
    """Two ranks, each with half of every batch, train what one process trains; also if gradients are accumulated."""
    for name in ("train", "valid", "test"):
        texts = [f"the number {i % 4} comes before the number {i % 4 + 1}." for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["lora", "--train", "--test", "--model", model, "--data", tmp_path, "--num-layers", 2]
    iterations = 20 * accumulate  # 20 updates
    arguments += ["--batch-size", 4, "--iters", iterations, "--save-every", iterations, "--val-batches", 1]
    arguments += ["--steps-per-report", iterations // 4, "--learning-rate", 1e-3, "--test-batches", 1]
    arguments += ["--grad-accumulation-steps", accumulate]
    losses, adapters = {}, {}
    for ranks in (1, 2):
        directory = tmp_path / f"adapters of {ranks}"
        printed = mlx_lm(*arguments, "--adapter-path", directory, ranks=ranks)
        losses[ranks] = [float(loss) for loss in re.findall(r"\d\.\d\d\d(?= [▼▲])|(?<=Test loss )\d\.\d\d\d", printed)]
        adapters[ranks] = mx.load(str(directory / "adapters.safetensors"))
        assert "[1]" not in printed
    assert len(losses[2]) == 5 and losses[2] == pytest.approx(losses[1], abs=2e-3)
    assert losses[2][-1] < losses[2][0] / 2
    assert adapters[1].keys() == adapters[2].keys() and len(adapters[2]) > 8
    for name, adapter in adapters[1].items():
        assert mx.allclose(adapter, adapters[2][name], rtol=1e-3, atol=1e-4), name


@contextmanager
def server(model, ranks, module="mlx_lm"):
    """The address of a running server. Ctrl-C stops it, and the port is closed then."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*(LAUNCH if ranks > 1 else []), *(["-n", str(ranks), "--"] if ranks > 1 else [])]
    command += [sys.executable, "-m", module, "server", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_there():
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    try:
        assert wait_for(is_there, 60)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130 or ranks == 1
        assert not is_there()
    finally:
        process.kill()
        process.wait()


def ask(address, content):
    request = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    header = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(request).encode(), header), timeout=60) as r:
        return json.load(r)["choices"][0]["message"]["content"]


@pytest.mark.long
def test_server_handles_two_requests_at_once(model):
    questions = ["hello", "another question"]
    responses = {}
    for ranks in (1, 2):
        with server(model, ranks) as address, ThreadPoolExecutor(2) as threads:
            responses[ranks] = list(threads.map(lambda question: ask(address, question), questions))
            assert responses[ranks] == [ask(address, question) for question in questions]
    assert responses[1] == responses[2] and len(set(responses[2])) == 2


@pytest.mark.long
@pytest.mark.parametrize("kind, ranks", [("gemma", 2), ("qwen2", 3)])
def test_server_of_mlxdist_lm(saved_model, kind, ranks):
    directory = saved_model(kind)
    with server(directory, 1) as address:
        expected = [ask(address, question) for question in ("hello", "another question")]
    with server(directory, ranks, "mlxdist.lm") as address, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda question: ask(address, question), ("hello", "another question"))) == expected


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_stop_words_of_the_server_of_mlxdist_lm(tmp_path, ranks):
    """Words of its answers, which the model writes with any tokens. Requests with a seed are in no batch."""
    generator = random.Random(ranks)

    def choice(number, **stop):
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
        body = {"prompt": f"question {number}", "max_tokens": 30} | sampled | stop
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        return answer["choices"][0], answer["usage"]["completion_tokens"]

    def compare(number):
        full, tokens = choice(number)
        start = generator.randrange(len(full["text"]))
        words = [full["text"][start : start + 1 + number % 5], "never said"]
        found, fewer = choice(number, stop=words)
        assert found == {"index": 0, "finish_reason": "stop", "text": full["text"][: full["text"].find(words[0])]}
        assert fewer <= tokens

    with server(save_bpe_model_folder(tmp_path / "tiny"), ranks, "mlxdist.lm") as address:
        address = address.replace("chat/", "")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(compare, range(24)))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            choice(0, stop=["", "word"])


# `mlx_lm evaluate` takes names of tasks that lm_eval knows, whose data is in the network; this adds those of a
# directory.
EVALUATE = """
import functools, sys
import lm_eval.evaluator
from mlx_lm import evaluate
manager = lm_eval.evaluator.TaskManager
lm_eval.evaluator.TaskManager = functools.partial(manager, include_path=sys.argv.pop(1), include_defaults=False)
evaluate.main()
"""


@pytest.mark.long
def test_evaluate(tmp_path, model, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; mlx_lm evaluate needs it")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache of datasets"))
    # As many on every rank: else mlx-lm 0.32.2 gets more scores back than it has asked for, with any backend.
    questions = [
        {"question": f"{i} and {i} is", "choices": [f" {2 * i}", f" {2 * i + 1}", f" {i}"], "answer": 0}
        for i in range(8)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    results = {}
    for ranks in (1, 2):
        directory = tmp_path / f"results of {ranks}"
        command = [*LAUNCH, "-n", str(ranks), "--", sys.executable, "-c", EVALUATE, str(tmp_path)]
        command += ["--model", str(model), "--tasks", "sums", "--output-dir", str(directory)]
        job = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert job.returncode == 0, job.stdout + job.stderr
        (file,) = directory.iterdir()
        results[ranks] = json.loads(file.read_text())
        assert ("Evaluating with 2 nodes" in job.stdout) == (ranks == 2)
    assert results[1] == results[2] and results[2]["sums"]["sample_len"] == 8
