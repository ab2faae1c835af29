"""A directory of mlx-lm with a model of random weights, and a tokenizer that has a token for each byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["byte_tokenizer", "save_byte_model", "save_byte_tokenizer"]

_END = "<|end|>"
_ADDED = 0.04
_VISIBLE = ord("~") - ord("!") + 1  # ASCII characters but for the space; their tokens are the first ones


def save_byte_model(directory: Path, hidden: int, layers: int) -> Path:
    """Qwen2 in float32, with weights so large that an answer depends on the prompt. Returns its draft model's folder.

    The draft model is the first layer alone. The others add so little that it is right for two of three tokens or so.
    Each token of an answer is one visible ASCII character, so that a stream has an event for each, and none is the
    end: answers have as many tokens as are asked for.
    """
    from .models import make_qwen2  # not needed for the tokenizer, which tests use

    model = make_qwen2(hidden, layers, 256 + 1)
    model.update(tree_map(lambda array: array * 2, model.parameters()))
    model.lm_head.weight[_VISIBLE:] = 0  # never the largest logit
    for layer in model.layers[1:]:
        layer.self_attn.o_proj.weight *= _ADDED
        layer.mlp.down_proj.weight *= _ADDED
    mx.eval(model.parameters())
    draft = directory / "draft"
    for folder, layers in ((directory, layers), (draft, 1)):
        folder.mkdir(exist_ok=True)
        model.model.layers = model.model.layers[:layers]
        save_model(folder, model)
        save_config(dataclasses.asdict(model.args) | {"num_hidden_layers": layers}, folder / "config.json")
        save_byte_tokenizer(folder, _END)
    return draft


def save_byte_tokenizer(directory: Path, end: str, others: Sequence[str] = (), template: str | None = None) -> None:
    byte_tokenizer(end, others, template).save_pretrained(directory)


def byte_tokenizer(end: str, others: Sequence[str] = (), template: str | None = None) -> PreTrainedTokenizerFast:
    """Tokens 0 to 255 are bytes, in the order of the characters that stand for them; then ``end``, and others."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), end, *others]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, additional_special_tokens=list(others), chat_template=template
    )
