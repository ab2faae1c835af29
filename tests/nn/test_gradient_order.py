"""Gradients of sharded models, whichever of them is evaluated first: MLX's order of collectives is that of the graph,
so the graphs of all ranks are alike."""

import pytest
import tiny_models

# Sharded by patterns and by the model's own shard(): norms of one head, experts, latent heads, sinks, fused layers; KV
# heads that all ranks hold.
KINDS = ["qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "plamo2", "qwen3_5"]


# Models that these heads do not fit, and one without a gradient in mlx-lm itself.
LEFT_OUT = ("deepseek_v41", "prism_hadamard_qwen35")


def trainable() -> list[str]:
    return [name for name in tiny_models.compared_files() if name not in (*tiny_models.NOT_TRAINED, *LEFT_OUT)]


@pytest.mark.long
def test_gradients_of_shared_kv_heads_in_any_order(run_scenarios):
    run_scenarios("gradient_order.py", 4, "values", "4:2", "qwen3")


def test_graphs_of_all_ranks_are_alike(run_scenarios):
    names = ["qwen3", "gpt_oss", "plamo2"]
    run_scenarios("gradient_order.py", 3, "graphs", "4:1", *names)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "heads"), [(2, ""), (2, "4:1"), (3, "6:2"), (3, "8:4"), (3, "4:1"), (4, ""), (4, "4:2")]
)
def test_graphs_of_every_model_file_are_alike(run_scenarios, ranks, heads):
    names = trainable()
    assert len(names) > 115
    run_scenarios("gradient_order.py", ranks, "graphs", heads, *names, timeout=500)


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["values", "values_compiled"])
@pytest.mark.parametrize(("ranks", "heads"), [(2, "4:1"), (3, "4:1"), (3, "6:2"), (4, "4:2")])
def test_gradients_of_every_kind_in_any_order(run_scenarios, ranks, heads, scenario):
    run_scenarios("gradient_order.py", ranks, scenario, heads, *KINDS, timeout=500)
