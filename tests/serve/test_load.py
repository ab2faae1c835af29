"""`mlxdist serve` with models of other kinds, under load: the same tokens as one process."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ServerProcess, post, random_request, save_model_folder

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "kind, ranks",
    [
        ("llama", 2),
        ("gemma3_text", 2),
        ("mixtral", 2),
        ("qwen3_5", 2),
        ("qwen3_next", 2),
        ("deepseek_v3", 2),
        ("gpt_oss", 2),
        ("qwen3_moe", 3),
    ],
)
def test_models_of_other_kinds(tmp_path, kind, ranks):
    """Sliding windows, states of linear attention, latent attention, experts: batched, cached and cancelled alike."""
    folder = save_model_folder(tmp_path / kind, kind)
    generator = random.Random(3)
    bodies = [random_request(generator) for _ in range(10)]
    answers = {}
    for number in (1, ranks):
        with ServerProcess(folder, number, "--prefill-step-size", 16) as server, ThreadPoolExecutor(4) as threads:
            leaves = post({"prompt": "leaves", "max_tokens": 100, "logit_bias": {"256": -100}})
            with server.raw(leaves):
                answers[number] = [choices["choices"][0]["text"] for choices in threads.map(server.ask, bodies)]
            assert server.stop() == 0
    assert answers[ranks] == answers[1]
