"""`mlxdist serve` with split blocks: the answers of mlx-lm on one process, whatever the layers of the model become."""

import re

import pytest
from serving import require_answers, save_model_folder

EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "kind, ranks, options, fields",
    [("qwen3", 2, [], {})]
    + [
        pytest.param(*row, marks=pytest.mark.long)
        for row in (
            ("qwen3", 1, [], {}),
            ("llama", 2, ["--pipeline", "--stream-weights"], {}),
            ("qwen3", 3, ["--rank-shares", "2,1,1"], EIGHT_HEADS),
            ("qwen3", 4, ["--tp", "2", "--pipeline"], EIGHT_HEADS),
            ("qwen3", 4, ["--stream-weights"], EIGHT_HEADS | {"num_key_value_heads": 2}),
            ("llama", 2, ["--prompt-lookup"], {"bits": 4, "intermediate_size": 128}),
            ("llama", 2, ["--shard-vocabulary"], {"tie_word_embeddings": True}),
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
    own = any("the model's layers are mlx-lm's own, and not split: SplitBlock: " in line for line in lines)
    assert own == (kind in ("gemma3_text", "qwen3_moe"))
    assert own != any("the model's layers are split blocks" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_server_measures_which_layers_are_faster(tmp_path, ranks):
    """Without an option rank 0 says what all ranks have measured, and what follows from it."""
    lines = require_answers(save_model_folder(tmp_path), ranks)
    (said,) = [line for line in lines if "the model's layers are" in line]
    milliseconds = [float(number) for number in re.findall(r"(\d+\.\d+)", said)]
    assert len(milliseconds) == 2, said
    assert "split blocks" in said or "mlx-lm's own" in said


@pytest.mark.long
def test_the_layers_stay_where_an_operator_asks_for_it(tmp_path):
    lines = require_answers(save_model_folder(tmp_path), 2, "--no-split-blocks")
    assert not any("layers are" in line for line in lines)
