"""`mlxdist serve --shard-vocabulary`: the tokens of mlx-lm's samplers, from logits that no rank has whole."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ServerProcess, random_request, save_model_folder


def with_logprobs(choice):
    """The choice, whose log-probabilities are equal to others up to rounding."""
    if found := choice["logprobs"]:
        close = lambda value: pytest.approx(value, abs=1e-3)
        found["token_logprobs"] = list(map(close, found["token_logprobs"]))
        found["top_logprobs"] = [{text: close(top) for text, top in tops.items()} for tops in found["top_logprobs"]]
    return choice


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, ranks",
    [
        ("qwen3", 2),
        pytest.param("qwen3", 1, marks=pytest.mark.long),
        pytest.param("qwen3", 3, marks=pytest.mark.long),
        pytest.param("gemma3_text", 2, marks=pytest.mark.long),  # the embedding is the output layer
        pytest.param("gpt_oss", 2, marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_whole_logits(tmp_path, kind, ranks):
    """Greedy, with every filter, penalties, biases, and log-probabilities; in one batch."""
    folder = save_model_folder(tmp_path / kind, kind, tie_word_embeddings=kind == "gemma3_text")
    generator = random.Random(ranks)
    bodies = [random_request(generator) for _ in range(16)]
    filters = [{"top_k": 20}, {"min_p": 0.02}, {"top_p": 0.8, "top_k": 50}, {"xtc_probability": 0.5}, {"logprobs": 0}]
    for number, fields in enumerate([*filters, {"logprobs": 3}]):
        bodies.append({"prompt": f"filtered {number}", "max_tokens": 24, "temperature": 0.9, "seed": number} | fields)

    def answers(server):
        with ThreadPoolExecutor(6) as threads:
            return [with_logprobs(answer["choices"][0]) for answer in threads.map(server.ask, bodies)]

    with ServerProcess(folder, 1) as server:
        expected = answers(server)
    with ServerProcess(folder, ranks, "--shard-vocabulary") as server:
        assert answers(server) == expected
        assert server.stop() == 0
