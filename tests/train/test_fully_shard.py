"""mlxdist.train.fully_shard against one process that has the batches of all ranks; its messages, bytes and memory."""

import pytest

CHECKS = ["like_one_process", "bytes_on_the_wire", "frozen_bytes", "compiled", "refused"]
LONG = ["blocks_alone", "checkpointed", "compute_dtypes"]
MODELS = ["low_rank_adapters", "models_of_mlx_lm"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("check", CHECKS + MODELS)
def test_trains(run_ranks, check, ranks):
    assert run_ranks("fully_shard.py", ranks, check) == [f"{check} done\n"] * ranks


@pytest.mark.parametrize("check", ["like_one_process", "refused"])
def test_group_of_one(run_ranks, check):
    assert run_ranks("fully_shard.py", 1, check) == [f"{check} done\n"]
