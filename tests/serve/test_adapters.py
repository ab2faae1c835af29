"""Adapters of single requests: the tokens are mlx-lm's with that adapter alone, whatever else is in the batch."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer
from serving import ServerProcess, save_adapters, save_model_folder

NAMES = ("all-layers", "two-layers", "no-effect")


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """Its folder, and those of three adapters. A test may have it quantized, to the bits that it says."""
    folder = tmp_path_factory.mktemp("model")
    # Sizes that three ranks can share.
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}
    saved = save_model_folder(folder / "tiny", bits=getattr(request, "param", None), **sizes)
    keys = ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", "lm_head"]
    paths = [
        save_adapters(folder / NAMES[0], saved, seed=1, rank=4),
        save_adapters(folder / NAMES[1], saved, seed=2, layers=2, rank=7, scale=5.0, keys=keys),
        save_adapters(folder / NAMES[2], saved, seed=3, layers=1, rank=2, scale=0.0),
    ]
    return saved, paths


@pytest.fixture(scope="module")
def alone(model):
    """A function: the tokens that mlx-lm generates for a prompt with an adapter, or with none for 0."""
    folder, paths = model
    loaded = [load(str(folder), adapter_path=None if path is None else str(path)) for path in (None, *paths)]

    def tokens(adapter, prompt, max_tokens, temperature=0.0, seed=0):
        mx.random.seed(seed)
        made = stream_generate(*loaded[adapter], prompt, max_tokens=max_tokens, sampler=make_sampler(temperature))
        return [response.token for response in made]

    return tokens


def requests_of(alone):
    """Overlapping ones of every adapter; then some with prompts that others with the same, or another, adapter had."""
    prompts = [list(range(40)), [5], [7, 8, 9], list(range(60, 93)), [11, 12, 13, 14]]
    requests = []
    for number in range(9):
        given = {"prompt": prompts[number % 5], "max_tokens": 16, "seed": number, "temperature": 0.9 * (number % 2)}
        requests.append(given | {"adapter": number % 4, "step": number // 3, "cached": 0})
    for number, (adapter, cached) in enumerate([(0, 39), (1, 39), (2, 0), (2, 39), (3, 0)]):
        given = {"prompt": prompts[0], "max_tokens": 8, "seed": 0, "temperature": 0.0}
        requests.append(given | {"adapter": adapter, "step": 60 + 20 * number, "cached": cached})
    names = ("adapter", "prompt", "max_tokens", "temperature", "seed")
    for request in requests:
        request["expected"] = alone(**{name: request[name] for name in names})
    return requests


@pytest.mark.parametrize(
    "model, ranks, stages",
    [
        (None, 2, 1),
        *(pytest.param(None, *case, marks=pytest.mark.long) for case in ((1, 1), (3, 1), (2, 2), (3, 3))),
        *(pytest.param(4, *case, marks=pytest.mark.long) for case in ((1, 1), (3, 1), (2, 2))),
    ],
    indirect=["model"],
)
def test_a_batch_with_several_adapters_has_the_tokens_of_each_alone(run_ranks, tmp_path, model, alone, ranks, stages):
    folder, paths = model
    requests = requests_of(alone)
    first = [alone(adapter, list(range(40)), 16) for adapter in range(4)]
    assert first[3] == first[0] and len({tuple(tokens) for tokens in first}) == 3  # they do something, but for the last
    (tmp_path / "plan.json").write_text(json.dumps({"adapters": list(map(str, paths)), "requests": requests}))
    arguments = [folder, stages, tmp_path / "plan.json"]
    for output in run_ranks("serving_adapters.py", ranks, *arguments, environment={"MLX_DISABLE_COMPILE": "1"}):
        assert output.endswith("14 requests: ok\n")


@pytest.fixture(scope="module")
def texts(model, alone):
    """A function: the text that mlx-lm generates for a prompt with an adapter, by its name; the model's is "tiny"."""
    tokenizer = load_tokenizer(model[0])

    def text(name, prompt, max_tokens=12):
        tokens = alone(["tiny", *NAMES].index(name), tokenizer.encode(prompt), max_tokens)
        return tokenizer.decode([token for token in tokens if token not in tokenizer.eos_token_ids]).rstrip("\ufffd")

    return text


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_names_its_adapter(model, texts, ranks):
    """As `model`, which is vLLM's convention, or as mlx-lm's `adapters`; what is no name of one is refused."""
    folder, paths = model
    options = [f"--adapter={name}={path}" for name, path in zip(NAMES, paths)]
    with ServerProcess(folder, ranks, *options) as server:
        listed = server.ask(None, "/v1/models")["data"]
        assert [each["id"] for each in listed] == ["tiny", *NAMES]
        assert [each.get("parent") for each in listed] == [None, *["tiny"] * 3]
        assert server.ask(None, f"/v1/models/{NAMES[1]}")["id"] == NAMES[1]

        def ask(fields):
            answer = server.ask({"prompt": "which one", "max_tokens": 12} | fields)
            assert answer["model"] == fields.get("adapters", fields.get("model", "tiny"))
            return answer["choices"][0]["text"].rstrip("\ufffd")

        bodies = [{"model": name} for name in ("tiny", *NAMES)]
        bodies += [{"adapters": name} for name in NAMES]
        bodies += [{"model": "tiny", "adapters": NAMES[0]}, {"model": NAMES[1], "adapters": NAMES[1]}, {}]
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(ask, bodies))
        assert found == [texts(body.get("adapters") or body.get("model", "tiny"), "which one") for body in bodies]
        for name, body, status, words in (
            ("unknown", {"model": "other"}, 404, "served here is tiny, with the adapters all-layers, two-layers, no-e"),
            ("unknown", {"adapters": "other"}, 404, "is served with the adapters all-layers, two-layers, no-effect"),
            ("a path", {"model": str(paths[0])}, 404, "the model served here is tiny"),
            ("a path", {"adapters": str(paths[0])}, 404, "is served with the adapters"),
            ("a list", {"adapters": list(NAMES)}, 400, "adapters must be a string"),
            ("two", {"model": NAMES[0], "adapters": NAMES[1]}, 400, "name different adapters"),
        ):
            found, answer, _ = server.request({"prompt": "x", "max_tokens": 2} | body)
            assert (found, words in answer["error"]["message"]) == (status, True), (name, answer)
        assert server.stop() == 0


@pytest.mark.long
def test_an_adapter_of_all_requests(model, texts):
    """mlx_lm.server's --adapter-path."""
    with ServerProcess(model[0], 2, "--adapter-path", model[1][0]) as server:
        assert server.text("which one").rstrip("\ufffd") == texts(NAMES[0], "which one")
        assert server.request({"prompt": "x", "adapters": NAMES[0]})[0] == 404


@pytest.mark.long
def test_adapters_that_cannot_be_served_are_an_error_at_the_start(model, tmp_path):
    folder, paths = model
    other = save_model_folder(tmp_path / "other", hidden_size=48)
    experts = save_model_folder(tmp_path / "experts", "qwen3_moe")
    of_experts = save_adapters(tmp_path / "of-experts", experts, seed=1)
    config = json.loads((paths[0] / "adapter_config.json").read_text())
    changed = {}
    for kind in ("dora", "full"):
        changed[kind] = tmp_path / kind
        shutil.copytree(paths[0], changed[kind])
        (changed[kind] / "adapter_config.json").write_text(json.dumps(config | {"fine_tune_type": kind}))

    def error(*arguments, model=folder):
        command = [sys.executable, "-m", "mlxdist", "serve", *map(str, (model, "--port", 0, "-n", 2, *arguments))]
        job = subprocess.run(
            command, capture_output=True, text=True, timeout=90, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        assert job.returncode == 2 and "Traceback" not in job.stderr, job.stderr
        return job.stderr

    one = ("--adapter", f"a={paths[0]}")
    assert "is not NAME=PATH" in error("--adapter", paths[0])
    assert "unlike '../a'" in error("--adapter", f"../a={paths[0]}")
    assert "tiny is the name of the model" in error("--adapter", f"tiny={paths[0]}")
    assert "a is the name of two adapters" in error(*one, "--adapter", f"a={paths[1]}")
    assert "--adapter for those that name it; give one" in error(*one, "--adapter-path", paths[1])
    assert "adapter_path must be a directory of mlx-lm's lora training" in error(*one, "--adapter", f"b={tmp_path}")
    assert "which is not that of this model" in error(*one, model=other)
    assert "cannot be sharded; fuse them" in error(*one, "--adapter", f"b={changed['dora']}")
    assert "must be of the kind 'lora'" in error(*one, "--adapter", f"b={changed['full']}")
    words = error("--adapter", f"a={of_experts}", model=experts)
    assert "must be on linear layers, and one is a LoRASwitchLinear on model.layers." in words
