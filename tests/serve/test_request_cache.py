"""Models that fail in mlx-lm's batches are served one request at a time, with the tokens of one process."""

import mlx.core as mx
import pytest
from mlx_lm import load
from serving import CONTEXT, ServerProcess, require_answers, save_model_folder


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, ranks, options",
    [("gemma2", 2, ())]
    + [
        pytest.param(*row, marks=pytest.mark.long)
        for row in (
            ("gemma2", 3, ("--rank-shares", "2,1,1", "--shard-vocabulary")),
            ("gpt_bigcode", 2, ("--shard-vocabulary",)),
            ("llama4", 2, ("--pipeline",)),
            ("llama4", 1, ()),
            ("llama4", 2, ()),
            ("deepseek_v41", 1, ()),
            ("deepseek_v41", 2, ("--stream-weights",)),
        )
    ],
)
def test_answers_are_those_of_one_process(tmp_path, kind, ranks, options):
    fields = {"n_positions": CONTEXT} if kind == "gpt_bigcode" else {}
    require_answers(save_model_folder(tmp_path, kind, **fields), ranks, *options)


def test_the_context_ends_with_the_positions_that_a_model_has(tmp_path):
    """GPT-2's table of positions is 64 long here: what is behind it would be read from other memory."""
    with ServerProcess(save_model_folder(tmp_path, "gpt2", n_positions=64)) as server:
        assert server.text("a" * 60, 2)
        status, answer, _ = server.request({"prompt": "a" * 70, "max_tokens": 2}, "/v1/completions")
        assert status == 400 and "at most 63 are served here" in answer["error"]["message"], answer


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deepseek_v41", "llama4"])
def test_a_prefix_comes_back_from_the_disk(tmp_path, kind):
    """States of kinds that mlx-lm cannot set, and that a batch cannot have."""
    folder = save_model_folder(tmp_path / kind, kind)
    options = ("--prompt-cache-dir", tmp_path / "kept")
    require_answers(folder, 2, *options)
    assert any("parts of prompts and answers on disk" in line for line in require_answers(folder, 2, *options))


@pytest.mark.long
def test_log_probabilities_of_a_prompt_where_the_vocabulary_is_sharded(tmp_path):
    folder = save_model_folder(tmp_path, "gemma2")
    model, tokenizer = load(str(folder))
    prompt = tokenizer.encode("a prompt of some tokens")
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected = [logprobs[place, token].item() for place, token in enumerate(prompt[1:])]
    with ServerProcess(folder, 2, "--shard-vocabulary") as server:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        found = server.ask(body)["choices"][0]["logprobs"]["token_logprobs"]
    assert found[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
