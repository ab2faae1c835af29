"""The balance loss of a MoE model's routers, over every axis of a mesh: that of one process, written out row by row."""

import pytest

from mlxdist.base.errors import InvalidArgument
from mlxdist.train.config import TrainConfig

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, ["pp=2"]),
        pytest.param(1, ["dp=1"], marks=LONG),
        *(pytest.param(2, [f"{axis}=2"], marks=LONG) for axis in ("dp", "fsdp")),
        *(pytest.param(4, ["pp=2", f"{axis}=2"], marks=LONG) for axis in ("dp", "fsdp")),
        pytest.param(4, ["pp=4"], marks=LONG),
    ],
)
def test_ranks_train_as_one_process(run_ranks, ranks, sizes):
    outputs = run_ranks("router_balance.py", ranks, "qwen3_moe", *sizes)
    assert outputs == ["equal\n"] * ranks, outputs


@pytest.mark.parametrize("other", ["grad_checkpoint = true", "[mesh]\ncp = 2", "[mesh]\ntp = 2"])
def test_what_it_does_not_work_with_is_rejected(tmp_path, other):
    file = tmp_path / "train.toml"
    file.write_text(f'model = "m"\ndata = "d"\nrouter_aux_loss_coef = 0.1\n{other}\n')
    with pytest.raises(InvalidArgument, match="router_aux_loss_coef works without grad_checkpoint, cp and tp"):
        TrainConfig.read(file)
