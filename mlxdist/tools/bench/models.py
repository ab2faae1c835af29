"""Models of mlx-lm with random weights, the same on every rank."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3

__all__ = ["make_model", "make_qwen2"]

# The module of mlx-lm, and what its arguments are besides those that both have.
_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    # Attention and one expert of Mixtral 8x7B: at 4096 32 heads of 128, 8 KV heads, inner size 14336.
    "mixtral": (llama, {"model_type": "llama", "rms_norm_eps": 1e-5}),
    # Qwen3 8B: at 4096 32 heads of 128 with norms of their own, 8 KV heads, inner size 12288.
    "qwen": (qwen3, {"model_type": "qwen3", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}),
}


def make_model(family: str, hidden: int, dtype: mx.Dtype, layers: int = 1, vocabulary: int = 2) -> nn.Module:
    module, own = _FAMILIES[family]
    dim = 128 if hidden >= 1024 else 32
    heads = hidden // dim
    arguments = module.ModelArgs(
        hidden_size=hidden, head_dim=dim, num_attention_heads=heads, num_key_value_heads=max(2, heads // 4),
        intermediate_size=hidden * 7 // 2 if module is llama else hidden * 3, num_hidden_layers=layers,
        vocab_size=vocabulary, rope_theta=1e6, tie_word_embeddings=False, **own,
    )  # fmt: skip
    mx.random.seed(0)
    model = module.Model(arguments)
    model.apply(lambda x: x.astype(dtype))
    mx.eval(model.parameters())
    return model


def make_qwen2(hidden: int, layers: int, vocabulary: int) -> qwen2.Model:
    """A Qwen2 model: mlx-lm has a pipeline of its own for it, to compare with."""
    arguments = qwen2.ModelArgs(
        model_type="qwen2", hidden_size=hidden, num_hidden_layers=layers, intermediate_size=hidden * 3,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), rms_norm_eps=1e-6,
        vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    mx.random.seed(0)
    model = qwen2.Model(arguments)
    mx.eval(model.parameters())
    return model
