"""Greedy tokens of a model that load_sharded has cut, and of the same model in one process. Argument: a folder."""

import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from common import LARGE, group, rank, report
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model, save_config, save_model

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import tiny_models

from mlxdist.nn import load_sharded

TOKENS = 1000 if LARGE else 100
PROMPT = mx.array([5, 3, 8, 1, 9, 2])
FIELDS = {"vocab_size": 512, "max_position_embeddings": 2048, "hidden_size": 128, "tie_word_embeddings": False}


def saved(folder: Path, dtype: mx.Dtype) -> Path:
    if rank == 0:
        folder.mkdir(parents=True)
        model = tiny_models.build("qwen3", seed=1, **FIELDS)
        model.update(tree_map(lambda array: (array * 2).astype(dtype), model.parameters()))
        save_model(folder, model)
        save_config(tiny_models.config_of("qwen3") | FIELDS | {"model_type": "qwen3"}, folder / "config.json")
    group.barrier()
    return folder


def generated(model: object) -> tuple[list[int], float]:
    begin = time.perf_counter()
    found = [token for token, _ in generate_step(PROMPT, model, max_tokens=TOKENS)]
    return found, (time.perf_counter() - begin) / TOKENS * 1e6


figures: dict[str, object] = {"tokens": TOKENS}
for name in ("float32", "bfloat16"):
    folder = saved(Path(sys.argv[1]) / name, getattr(mx, name))
    sharded, _ = load_sharded(folder, group=group)
    found, microseconds = generated(sharded)
    whole, _ = load_model(folder)
    wanted, alone = generated(whole)
    figures |= {f"{name}, us a token": round(microseconds), f"{name}, one process, us a token": round(alone)}
    first = next((n for n, (a, b) in enumerate(zip(found, wanted)) if a != b), None)
    figures[f"{name}, first different token"] = first
    if first is not None:
        # How near the two largest logits were there: sums over ranks are rounded in another order.
        logits = np.array(whole(mx.array([*PROMPT.tolist(), *wanted[:first]])[None])[0, -1].astype(mx.float32))
        cut = np.array(sharded(mx.array([*PROMPT.tolist(), *wanted[:first]])[None])[0, -1].astype(mx.float32))
        two = np.sort(logits)[-2:]
        figures[f"{name}, lead there"] = float(two[1] - two[0])
        figures[f"{name}, largest difference of logits there"] = float(np.abs(logits - cut).max())
        assert two[1] - two[0] <= 2 * np.abs(logits - cut).max() < 0.1 * np.abs(logits).max(), figures
        assert name == "bfloat16", figures
report(**figures)
