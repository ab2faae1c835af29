"""MLX's own nn.fully_shard and clip_grad_norm_sharded on mlxdist's group; train.fully_shard passes the same checks."""

import pytest

CHECKS = ["forward", "training", "compute_dtype", "frozen"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("whose", ["mlx", pytest.param("mlxdist", marks=pytest.mark.long)])
@pytest.mark.parametrize("check", CHECKS)
def test_like_one_process(run_ranks, check, whose, ranks):
    assert run_ranks("mlx_fully_shard.py", ranks, check, whose) == [f"{check} done\n"] * ranks


@pytest.mark.long
@pytest.mark.parametrize("check", ["forward", "training", "frozen"])
def test_group_of_one(run_ranks, check):
    assert run_ranks("mlx_fully_shard.py", 1, check, "mlxdist") == [f"{check} done\n"]
