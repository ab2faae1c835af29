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
MODELS = ["low_rank_adapters", "models_of_mlx_lm"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("check", CHECKS + MODELS)
def test_trains(run_ranks, check, ranks):
    assert run_ranks("fully_shard.py", ranks, check) == [f"{check} done\n"] * ranks


@pytest.mark.long
@pytest.mark.parametrize("check", LONG)
def test_trains_in_other_ways(run_ranks, check):
    assert run_ranks("fully_shard.py", 2, check) == [f"{check} done\n"] * 2


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_hybrid(run_ranks, ranks):
    assert run_ranks("fully_shard.py", ranks, "hybrid") == ["hybrid done\n"] * ranks


@pytest.mark.parametrize(("ranks", "layers"), [(2, 12), *(pytest.param(n, 36, marks=pytest.mark.long) for n in (3, 4))])
def test_memory(run_ranks, ranks, layers):
    """What a rank needs beside its shards is up to 4.6 layers, so few layers on many ranks miss it: docs/status.md."""
    assert run_ranks("fully_shard.py", ranks, "memory", layers) == ["memory done\n"] * ranks


def test_the_program_of_activation_checkpointing(run_ranks, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "activation-checkpointing.md"
    for output in run_ranks(program_of(page, tmp_path), 2):
        assert f"    {output}" in page.read_text()


@pytest.mark.long
def test_bytes_of_checkpointed_layers(run_ranks):
    assert run_ranks("fully_shard.py", 2, "checkpointed_bytes") == ["checkpointed_bytes done\n"] * 2


@pytest.mark.parametrize("check", ["like_one_process", "refused"])
def test_group_of_one(run_ranks, check):
    assert run_ranks("fully_shard.py", 1, check) == [f"{check} done\n"]
