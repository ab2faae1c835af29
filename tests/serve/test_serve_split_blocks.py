"""`mlxdist serve --split-blocks`: the answers of mlx-lm on one process, whatever the layers of the model become."""

import pytest
from serving import require_answers, save_model_folder


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
    folder = save_model_folder(tmp_path / kind, kind, **fields)
    options = [option.replace("MODEL", str(folder)) for option in options]
    lines = require_answers(folder, ranks, "--split-blocks", *options)
    own = any("the layers are mlx-lm's own, and not split: SplitBlock: " in line for line in lines)
    assert own == (kind in ("gemma3_text", "qwen3_moe"))
