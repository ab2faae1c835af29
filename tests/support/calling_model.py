"""A tiny model whose answer to every prompt is the same call of a tool, as text of its own format."""

from pathlib import Path

import mlx.core as mx
from serving import save_model_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["CALL", "TOOL", "save_model_that_calls_a_tool"]

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = ["<tool_call>", '{"name": "look", ', '"arguments": {"at": ', "1}}", "</tool_call>", "<|end|>"]
_VOCABULARY = 64
# mlx-lm finds the format of calls by what the template has. A call of the history is written as the model writes it.
_TEMPLATE = """\
{%- for message in messages %}<|message|>{{ message.content }}\
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}\
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>\
{%- endfor %}{% if message.role == "assistant" %}<|end|>{% endif %}{% endfor %}<|message|>"""


def save_model_that_calls_a_tool(folder: Path) -> Path:
    """Each token has one that follows it, and what follows a prompt is CALL."""
    save_model_folder(folder, vocab_size=_VOCABULARY)
    tokens = ["<|message|>", *CALL, *(f"w{i}" for i in range(_VOCABULARY - 1 - len(CALL)))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="w0"))
    tokenizer.add_tokens(CALL[:-1])  # so that their text is these tokens, wherever it is
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=["<|message|>"]
    )
    saved.chat_template = _TEMPLATE
    saved.save_pretrained(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    for name in weights:  # a layer adds nothing to the embedding of the last token
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(weights[name])
    embedding = weights["model.embed_tokens.weight"] = mx.eye(_VOCABULARY)
    weights["model.norm.weight"] = mx.ones(_VOCABULARY)
    weights["lm_head.weight"] = mx.roll(embedding, 1, axis=0)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
