"""Adapters of single requests: the tokens are mlx-lm's with that adapter alone, whatever else is in the batch."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.lora import LoRALinear
from serving import VOCABULARY, ServerProcess, save_adapters, save_model_folder

from mlxdist.nn.tensor_parallel.multi_lora import MultiLoRALinear, adapters_of_rows

NAMES = ("all-layers", "two-layers", "no-effect")


@pytest.fixture(scope="module", params=[None, pytest.param(4, marks=pytest.mark.long)], ids=["plain", "4 bits"])
def model(request, tmp_path_factory):
    """Its folder, and those of three adapters."""
    folder = tmp_path_factory.mktemp("model")
    # Sizes that three ranks can share.
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}
    saved = save_model_folder(folder / "tiny", bits=request.param, **sizes)
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
    "ranks, stages",
    [(2, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1), (3, 1), (2, 2), (4, 2)))],
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


def options_of(model):
    return [f"--adapter={name}={path}" for name, path in zip(NAMES, model[1])]
