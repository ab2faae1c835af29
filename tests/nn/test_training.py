"""Sharded models train: the gradient of every parameter is the full model's, and so is what an optimizer makes of
it."""

import pytest
import tiny_models

# One for each cause: norms of one head; routers, shared experts; latent projections; experts apart from their router;
# a norm over all heads; biases that are added once.
TYPICAL = ["qwen3", "mixtral", "qwen2_moe", "deepseek_v3", "gemma4_text", "olmo2", "minimax", "gpt_oss"]
FAMILIES = [
    "llama", "qwen3", "qwen3_next", "qwen3_5_moe", "gemma3_text", "gemma4_text", "glm4_moe", "deepseek_v3", "gpt_oss",
    "mixtral", "minimax",
]  # fmt: skip


def trainable() -> list[str]:
    return [name for name in tiny_models.compared_files() if name not in tiny_models.NOT_TRAINED]


def test_gradients_of_typical_models(run_scenarios):
    run_scenarios("training.py", 2, "models", "", *TYPICAL)


def test_collectives_of_a_step(run_scenarios):
    run_scenarios("training.py", 2, "collectives")


@pytest.mark.long
def test_parallel_regions(run_scenarios):
    """Adapters on sharded layers and experts, refusals, threads, what decoding costs, what is saved and freed."""
    run_scenarios("training.py", 2, "parallel_regions")


@pytest.mark.long
def test_gradients_of_every_model_file(run_scenarios):
    names = trainable()
    assert len(names) > 115
    run_scenarios("training.py", 2, "models", "", *names, timeout=500)


@pytest.mark.long
@pytest.mark.parametrize("heads", ["6:3", "8:4", "8:2", "4:1", "6:2"])
def test_gradients_on_three_ranks(run_scenarios, heads):
    """Also of heads that are sharded unevenly, of KV heads that two of the ranks hold, and of which one has copies."""
    names = sorted({*TYPICAL, *FAMILIES})
    run_scenarios("training.py", 3, "models", heads, *names, timeout=240)


@pytest.mark.long
def test_gradients_of_kv_heads_that_several_ranks_hold(run_scenarios):
    names = ["llama", "smollm3", "qwen3_5", "granite", "gemma2", "phi3", "gpt_oss", "qwen3_moe", "iquestloopcoder"]
    run_scenarios("training.py", 2, "models", "4:1", *names, timeout=240)


@pytest.mark.long
def test_weights_whole_experts_and_adapters(run_scenarios):
    run_scenarios("training.py", 2, "cases", timeout=240)


@pytest.mark.long
def test_adapters_of_every_model_file(run_scenarios):
    names = [name for name in trainable() if name not in tiny_models.NOT_ADAPTED]
    run_scenarios("training.py", 2, "adapters", "", *names, timeout=500)


@pytest.mark.long
@pytest.mark.parametrize("heads", ["8:2", "6:2"])
def test_adapters_of_uneven_and_shared_heads(run_scenarios, heads):
    names = ["llama", "smollm3", "phi3", "gpt_oss", "iquestloopcoder"]
    run_scenarios("training.py", 3, "adapters", heads, *names, timeout=240)


@pytest.mark.long
def test_compiled_and_with_checkpoints(run_scenarios):
    run_scenarios("training.py", 2, "transformed", timeout=240)


@pytest.mark.long
def test_weights_after_twenty_steps(run_scenarios):
    run_scenarios("training.py", 2, "steps", *FAMILIES, timeout=400)
