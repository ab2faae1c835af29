"""Every model file of the installed mlx-lm, sharded over ranks: the logits are those of the full model."""

import model_table
import pytest
import tiny_models

TYPICAL = ["qwen3", "gpt_oss", "mixtral", "internlm2", "olmo2", "cohere"]


def test_typical_models(run_scenarios):
    """By their own shard() and by patterns: experts, sinks, fused projections, norms over all heads."""
    run_scenarios("shard_model.py", 2, "models", *TYPICAL)


@pytest.mark.long
def test_heads_that_the_ranks_do_not_divide(run_scenarios):
    """By default unequal shards, and copies of KV heads where there are fewer than ranks."""
    run_scenarios("shard_model.py", 3, "uneven")


@pytest.mark.long
def test_every_model_file(run_scenarios):
    """Found in mlx-lm's directory: a new file without a configuration fails here by its name."""
    names = tiny_models.compared_files()
    assert len(names) > 115
    run_scenarios("shard_model.py", 2, "models", *names, timeout=280)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_kv_heads_quantization_and_whole_experts(run_scenarios, ranks):
    run_scenarios("shard_model.py", ranks, "cases")


@pytest.mark.long
def test_grid(run_scenarios):
    run_scenarios("shard_model.py", 4, "grid")


@pytest.mark.long
def test_bad_input_is_the_same_error_on_all_ranks(run_scenarios):
    run_scenarios("shard_model.py", 2, "refused")


def test_the_page_of_models_is_current():
    """And at least 90 files are sharded. Written by `python tests/support/model_table.py`."""
    page = model_table.FILE.read_text()
    assert page == model_table.write()
    assert sum(line.count("| shard() |") + line.count("| patterns |") for line in page.splitlines()) >= 90
