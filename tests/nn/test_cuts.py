"""What every rank's arrays are parts of: taken from the full model they are equal, and together they are it."""

import pytest
import tiny_models

TYPICAL = ["llama", "phi3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmo2", "minimax"]


def test_cuts_of_typical_models(run_scenarios):
    run_scenarios("cuts.py", 2, "models", *TYPICAL)


@pytest.mark.long
def test_cuts_of_layers(run_scenarios):
    """Those of mlxdist.nn and MLX's, attention whose KV heads several ranks hold, flat shards."""
    for scenario in ("layers", "shared_kv_heads", "flat"):
        run_scenarios("cuts.py", 2, scenario)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_cuts_of_uneven_quantized_and_shared(run_scenarios, ranks):
    for scenario in ("cases", "layers", "shared_kv_heads", "flat"):
        run_scenarios("cuts.py", ranks, scenario, timeout=240)


@pytest.mark.long
def test_cuts_of_adapters(run_scenarios):
    run_scenarios("cuts.py", 2, "adapters", "llama", "mixtral", "qwen2_moe")


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["grid", "expert_grid"])
def test_cuts_of_a_grid(run_scenarios, scenario):
    run_scenarios("cuts.py", 4, scenario, timeout=240)


@pytest.mark.long
def test_cuts_of_every_model_file(run_scenarios):
    # Its own shard() cuts gates that are in no block.
    left_out = {*tiny_models.NOT_IMPORTED, "iquestloopcoder"}
    names = [name for name in tiny_models.model_files() if name not in left_out]
    run_scenarios("cuts.py", 2, "models", *names, timeout=500)
