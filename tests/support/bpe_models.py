"""Tiny models of mlx-lm with a BPE tokenizer whose tokens begin and end anywhere: within characters, across words."""

from pathlib import Path

from serving import save_model_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["CONTROL", "bpe_tokenizer", "save_bpe_model_folder"]

TEXT = (
    "A stop word ends the answer before it, wherever the borders of its tokens are. Über größere Wörter hinweg, naïve "
    "façade; слово и ответ; 停止词 在 答案 之前; 🙂🙃 the end of the answer, the next word. "
) * 3
CONTROL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # as added tokens, which mlx-lm finds
SIZE = 420


def save_bpe_model_folder(folder: Path, kind: str = "qwen3", template: str = "", **fields: object) -> Path:
    """``template``: of chats; with one mlx-lm finds reasoning and calls of tools, whose tokens are the last ones."""
    saved = bpe_tokenizer(template)
    save_model_folder(folder, kind, vocab_size=len(saved), **fields)
    saved.save_pretrained(folder)
    return folder


def bpe_tokenizer(template: str = "") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # words are not split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT[start : start + 40] for start in range(0, len(TEXT), 37)], trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template or None)
    if template:
        saved.add_tokens(CONTROL)
    return saved
