"""mlxdist.train.flops_per_token against counts by hand, and against the matrix products of the graph of a model."""

import math

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlxdist
from mlxdist import train

SEQUENCE = 32
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 20,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
# Of a layer, multiply-adds of a token: queries and output of 4 heads, keys and values of 2, each head of 20 features.
PROJECTIONS = 2 * 64 * 80 + 2 * 64 * 40
# Scores and weighted values of 4 heads over 32 tokens.
SCORES = 2 * 4 * 20 * 32
HEAD = 64 * 100


def dense(**fields) -> nn.Module:
    from mlx_lm.models import qwen3

    return qwen3.Model(qwen3.ModelArgs.from_dict(SIZES | {"model_type": "qwen3"} | fields))


def test_a_dense_model_by_hand():
    forward = 2 * (3 * (PROJECTIONS + SCORES + 3 * 64 * 96) + HEAD)
    found = train.flops_per_token(dense(), SEQUENCE)
    assert found == (forward, 2 * forward) and found.total == 3 * forward
    assert train.flops_per_token(dense(tie_word_embeddings=False), SEQUENCE) == found


def test_a_mixture_of_experts_by_hand():
    """Of three layers the first has no experts. Others have 8, of which a token takes 2, and a router."""
    from mlx_lm.models import qwen3_moe

    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True}
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(SIZES | experts))
    layers = 3 * (PROJECTIONS + SCORES) + 3 * 64 * 96 + 2 * (64 * 8 + 2 * 3 * 64 * 48)
    forward = 2 * (layers + HEAD)
    assert train.flops_per_token(model, SEQUENCE) == (forward, 2 * forward)


def test_frozen_and_quantized_matrices():
    """Of LoRA the frozen base has no gradients of its own; a quantized one is as large as it was."""
    model = dense()
    plain = train.flops_per_token(model, SEQUENCE)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path.endswith("up_proj"))
    assert train.flops_per_token(model, SEQUENCE).forward == plain.forward
    model.freeze()
    assert train.flops_per_token(model, SEQUENCE) == (plain.forward, 0)
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
    adapters = 2 * 4 * (64 + 80)
    found = train.flops_per_token(model, SEQUENCE)
    assert found.forward == plain.forward + adapters
    attention = 2 * 3 * SCORES
    assert found.backward == (found.forward - attention) + adapters + 2 * attention


def products_of(model: nn.Module) -> float:
    """Forward FLOPs for each of SEQUENCE tokens, from the shapes of all matrix products in the graph."""
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0

    def node(found: dict) -> None:
        nonlocal total
        if found["type"] == "inputs":
            shapes.update((name, shape) for name, shape, _ in found["inputs"])
        elif found["type"] == "constants":
            shapes.update((name, array.shape) for name, array in found["constants"])
        elif found["type"] == "primitive":
            shapes.update((name, shape) for name, shape, _ in found["outputs"])
            if found["name"] in ("Matmul", "AddMM", "GatherMM"):
                inner = shapes[found["inputs"][0][0]][-1]
                total += 2 * math.prod(found["outputs"][0][1]) * inner
            else:
                assert "Attention" not in found["name"]  # on the CPU it is products of matrices

    with mx.stream(mx.cpu):
        mx.export_function(node, lambda tokens: model(tokens), mx.arange(SEQUENCE)[None])
    return total / SEQUENCE


@pytest.mark.parametrize(
    "name", ["cohere", "deepseek_v2", "deepseek_v3", "gemma2", "glm4_moe", "gpt2", "llama", "mixtral", "phi3", "qwen2"]
)
def test_models_of_mlx_lm(name):
    model = tiny_models.build(name)
    assert train.flops_per_token(model, SEQUENCE).forward == products_of(model)


def test_other_models():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    assert train.flops_per_token(model, 1, attention_width=0) == (2 * 56, 4 * 56)
    assert train.flops_per_token(model, 10, attention_width=3) == (2 * 56 + 120, 4 * 56 + 240)


@pytest.mark.parametrize("sequence", [0, -1, 1.5, None])
def test_bad_sequences(sequence):
    with pytest.raises(mlxdist.InvalidArgument, match="sequence_length is"):
        train.flops_per_token(dense(), sequence)


def test_what_the_configuration_lacks():
    model = dense()
    del model.args.num_attention_heads
    with pytest.raises(mlxdist.InvalidArgument, match="does not have the number of heads, as num_attention_heads"):
        train.flops_per_token(model, SEQUENCE)
    assert train.flops_per_token(model, SEQUENCE, attention_width=3 * 80) == train.flops_per_token(dense(), SEQUENCE)
    with pytest.raises(mlxdist.InvalidArgument, match="attention_width is -1"):
        train.flops_per_token(model, SEQUENCE, attention_width=-1)
