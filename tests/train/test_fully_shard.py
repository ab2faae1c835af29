"""mlxdist.train.fully_shard against one process that has the batches of all ranks; its messages, bytes and memory."""

from pathlib import Path

import pytest
from guides import program_of

CHECKS = ["like_one_process", "bytes_on_the_wire", "frozen_bytes", "refused", "accumulated", "terms_of_shards"]
LONG = [
    "random_numbers_of_a_first_step",
    "blocks_alone",
    "left_out",
    "compiled",
    "checkpointed",
    "compute_dtypes",
    "results_without_gradients",
]
MODELS = ["low_rank_adapters", pytest.param("models_of_mlx_lm", marks=pytest.mark.long)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("check", CHECKS + MODELS)
def test_trains(run_scenarios, check, ranks):
    run_scenarios("fully_shard.py", ranks, check)


@pytest.mark.long
@pytest.mark.parametrize("check", LONG)
def test_trains_in_other_ways(run_scenarios, check):
    run_scenarios("fully_shard.py", 2, check)


def test_calls_of_a_layer(run_scenarios):
    run_scenarios("fully_shard.py", 2, "calls_of_a_layer")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_hybrid(run_scenarios, ranks):
    run_scenarios("fully_shard.py", ranks, "hybrid")


@pytest.mark.parametrize(("ranks", "layers"), [(2, 12), *(pytest.param(n, 36, marks=pytest.mark.long) for n in (3, 4))])
def test_memory(run_scenarios, ranks, layers):
    """What a rank needs beside its shards is up to 4.6 layers, so few layers on many ranks miss it: docs/status.md."""
    run_scenarios("fully_shard.py", ranks, "memory", layers)


def test_the_program_of_activation_checkpointing(run_ranks, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "activation-checkpointing.md"
    for output in run_ranks(program_of(page, tmp_path), 2):
        assert f"    {output}" in page.read_text()


@pytest.mark.long
def test_bytes_of_checkpointed_layers(run_scenarios):
    run_scenarios("fully_shard.py", 2, "checkpointed_bytes")


@pytest.mark.parametrize("check", ["like_one_process", "refused"])
def test_group_of_one(run_scenarios, check):
    run_scenarios("fully_shard.py", 1, check)
