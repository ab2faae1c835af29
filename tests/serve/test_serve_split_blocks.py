"""`mlxdist serve --split-blocks`: the answers of mlx-lm on one process, whatever the layers of the model become."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from mlx_lm import load, stream_generate
from serving import ServerProcess, save_model_folder

PROMPTS = [f"{number} question of a client" + " who asks at length" * (number % 4) for number in range(8)]


@pytest.mark.parametrize(
    "kind, ranks, options, fields",
    [("qwen3", 2, [], {})]
    + [
        pytest.param(*row, marks=pytest.mark.long)
        for row in (
            ("qwen3", 1, [], {}),
            ("qwen3", 3, ["--rank-shares", "2,1,1"], {"num_attention_heads": 8, "num_key_value_heads": 4}),
            ("llama", 2, ["--prompt-lookup"], {"bits": 4, "intermediate_size": 128}),
            ("qwen2", 2, ["--draft-model", "MODEL"], {"tie_word_embeddings": True}),
            ("qwen3", 2, ["--draft-model", "MODEL", "--shard-draft-model"], {}),
            ("gemma3_text", 2, [], {}),
            ("qwen3_moe", 2, [], {}),
        )
    ],
)
def test_a_server_answers_as_one_process(tmp_path, kind, ranks, options, fields):
    """At the same time, with places for some of them; and again, from the prefix cache."""
    folder = save_model_folder(tmp_path / kind, kind, **fields)
    loaded, tokenizer = load(str(folder))

    def answer(prompt):
        made = stream_generate(loaded, tokenizer, prompt, max_tokens=20)
        return "".join(response.text for response in made).rstrip("\ufffd")

    options = [option.replace("MODEL", str(folder)) for option in options]
    options = ["--split-blocks", "--decode-concurrency", 3, "--prefill-step-size", 16, *options]
    expected = [answer(prompt) for prompt in PROMPTS]
    with ServerProcess(folder, ranks, *options) as server, ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            found = list(threads.map(lambda prompt: server.text(prompt, 20), PROMPTS))
            assert [text.rstrip("\ufffd") for text in found] == expected
        assert server.metrics()["cached_prompt_tokens_total"] > 0
        own = any("the layers are mlx-lm's own, and not split: SplitBlock: " in line for line in server.lines)
        assert own == (kind in ("gemma3_text", "qwen3_moe"))
        assert server.stop() == 0, "".join(server.lines)
