"""mlxdist.train.clip_grad_norm: the norm and the gradients of one process, however the model is sharded."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxdist
from mlxdist.train import clip_grad_norm

LONG = pytest.mark.long
MESHES = [
    pytest.param(2, "dp=2", marks=LONG),
    pytest.param(2, "tp=2", marks=LONG),
    (2, "fsdp=2"),
    pytest.param(3, "fsdp=3", marks=LONG),
    pytest.param(4, "dp=2 fsdp=2", marks=LONG),
    pytest.param(4, "fsdp=2 tp=2", marks=LONG),
    pytest.param(4, "dp=2 tp=2", marks=LONG),
]


@pytest.mark.parametrize(("ranks", "axes"), MESHES)
def test_sharded(run_ranks, ranks, axes):
    for name in ("llama",) if ranks == 2 else ("llama", "gpt_oss"):
        outputs = run_ranks("clip_grad_norm.py", ranks, name, *axes.split())
        assert all(output.endswith("equal\n") for output in outputs), outputs


@LONG
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts(run_ranks, ranks):
    outputs = run_ranks("clip_grad_norm.py", ranks, "qwen3_moe", f"ep={ranks}")
    assert all(output.endswith("equal\n") for output in outputs), outputs


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    max_norm=st.floats(0, 1e3),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
def test_one_process(values, max_norm, dtype):
    gradients = {"a": mx.array(values).astype(dtype), "b": [mx.ones((2, 3))]}
    found, norm = clip_grad_norm(gradients, max_norm)
    wide = {"a": gradients["a"].astype(mx.float32), "b": gradients["b"]}
    expected, expected_norm = optim.clip_grad_norm(wide, max_norm)
    assert mx.allclose(norm, expected_norm)
    assert found["a"].dtype == dtype
    assert mx.allclose(found["a"].astype(mx.float32), expected["a"], 0.02, 1e-4)
    assert mx.allclose(found["b"][0], expected["b"][0])


def test_bad_input():
    for gradients, max_norm, model, text in [
        ({"a": mx.ones(2)}, -1.0, None, "must be 0 or more"),
        ({"a": mx.ones(2)}, float("nan"), None, "must be 0 or more"),
        ({"a": mx.ones(2, mx.int32)}, 1.0, None, "'a' must be an mx.array of floats"),
        ({"a": 1.0}, 1.0, None, "'a' must be an mx.array of floats"),
        ({"a": mx.ones(2)}, 1.0, nn.Linear(2, 2), "'a', which is no parameter"),
        ({"weight": mx.ones(2)}, 1.0, nn.Linear(2, 2), "has the shape"),
    ]:
        with pytest.raises(mlxdist.InvalidArgument, match=text):
            clip_grad_norm(gradients, max_norm, model=model)
