"""A folder to train from: tiny models of mlx-lm with a tokenizer, texts, and a configuration of `mlxdist train`."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import tiny_models
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(60)]
STEPS = 20


def make(root: Path) -> Path:
    """The models "qwen3", "qwen3_moe" and "quantized", of bfloat16, and the folder "data": texts of unequal lengths."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {word: 2 + number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, kind in (("qwen3", "qwen3"), ("qwen3_moe", "qwen3_moe"), ("quantized", "qwen3")):
        model, config = tiny_models.build(kind), tiny_models.config_of(kind)
        if name == "quantized":
            model.set_dtype(mx.bfloat16)
            model, config = quantize_model(model, config, 32, 4)
        save_model(root / name, model)
        save_config(config | {"model_type": kind, "eos_token_id": 1}, root / name / "config.json")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(root / name)
    random = np.random.default_rng(0)
    for split, count in (("train", 40), ("valid", 8)):
        texts = [" ".join(random.choice(WORDS, random.integers(3, 20))) for _ in range(count)]
        write(root / "data", split, [{"text": text} for text in texts])
    return root


def write(directory: Path, split: str, samples: list[dict]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{split}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def settings(folder: Path, tables: str = "", model: str = "qwen3", **changed: object) -> str:
    values: dict[str, object] = {
        "model": str(folder / model), "data": str(folder / "data"), "weights": "random", "optimizer": "adamw",
        "learning_rate": 1e-3, "batch_size": 4, "max_seq_length": 17, "iters": STEPS, "steps_per_report": 1,
        "steps_per_eval": 10, "val_batches": 1, "seed": 7, "max_grad_norm": 1.0, "report_to": "json",
    } | changed  # fmt: skip
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + "\n" + tables
