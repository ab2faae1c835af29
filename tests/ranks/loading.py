"""One rank of tests/test_loading.py. Arguments: the scenario, and a folder for files. Prints "right" at the end.

Rank 0 saves tiny models as mlx-lm does; every rank makes the same ones, so that it can compare what it has loaded.
"""

import json
import math
import os
import shutil
import sys
import warnings
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes, make_shards

import mlxdist
from mlxdist.nn import loading, streaming
from mlxdist.nn.loading import load_sharded, load_with_report
from mlxdist.nn.plan import Plan
from mlxdist.nn.shard_model import plan_shards
from mlxdist.nn.verify import verify

group = mlxdist.init()
rank, size = group.rank(), group.size()
base = Path(sys.argv[2])

HEADS = math.lcm(4, size)  # that the ranks can share
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 32 * HEADS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": size,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 32 * HEADS,
    "num_hidden_layers": 1,
    "intermediate_size": 32 * size,
    "num_attention_heads": HEADS,
    "num_key_value_heads": size,
    "num_local_experts": 2 * size,
    "num_experts_per_tok": 2,
}


def make(config: dict, dtype: mx.Dtype = mx.float32, bits: int | None = None) -> tuple[nn.Module, dict]:
    """A model with random weights, the same on every rank, and its configuration."""
    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(lambda x: (x * 3).astype(dtype), model.parameters()))  # so that logits depend on the prompt
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    mx.eval(model.parameters())
    return model, config


def save(name: str, model: nn.Module, config: dict, files: int = 1) -> Path:
    """Saves as mlx-lm does, on rank 0, in about as many files."""
    folder = base / name
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_weights(folder, dict(tree_flatten(model.parameters())), files)
        (folder / "config.json").write_text(json.dumps(config))
    group.barrier()
    return folder


def save_weights(folder: Path, weights: dict[str, mx.array], files: int) -> None:
    parts = np.array_split(list(weights), files)
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors" for i in range(files)]
    for file, part in zip(names, parts):
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part}, metadata={"format": "mlx"})
    index = {str(name): file for file, part in zip(names, parts) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def expect(error: type[Exception], words: list[str], function, *arguments, **keywords) -> None:
    """The same error on every rank, which all can go on after."""
    try:
        function(*arguments, **keywords)
    except error as caught:
        assert all(word in str(caught) for word in words), f"{words} not in {caught}"
    else:
        raise AssertionError(f"no {error.__name__} with {words}")
    assert mlxdist.all_sum(np.ones(1))[0] == size


def require_parts(model: nn.Module, whole: nn.Module, plan: Plan) -> None:
    """Every parameter is bitwise this rank's part of the whole one."""
    expected = dict(tree_flatten(whole.parameters()))
    for path, array in tree_flatten(model.parameters()):
        part = plan.shards[path].take(expected[path], rank)
        assert array.dtype == part.dtype and mx.array_equal(array, part, equal_nan=True), path


def models() -> None:
    """Each kind of model from local files and streamed: the parts, and the logits of all the ranks together."""
    for name, config, dtype, bits, files in [
        ("float32", QWEN3, mx.float32, None, 1),
        ("tied", QWEN3 | {"tie_word_embeddings": True}, mx.float32, None, 3),
        ("bfloat16", QWEN3, mx.bfloat16, None, 2),
        ("float16", QWEN3, mx.float16, None, 1),
        ("4 bits", QWEN3, mx.float32, 4, 3),
        ("4 bits, bfloat16", QWEN3, mx.bfloat16, 4, 1),
        ("mixtral", MIXTRAL, mx.float32, None, 2),
        ("mixtral, 4 bits", MIXTRAL, mx.float32, 4, 1),
    ]:
        whole, config = make(config, dtype, bits)
        folder = save(name, whole, config, files)
        for stream in (False, True):
            here = folder if not stream or rank == 0 else None
            model, tokenizer, report = load_with_report(here, stream=stream)
            assert tokenizer is None and report.computed == []
            require_parts(model, whole, report.plan)
            verification = verify(model, whole)
            assert verification.agrees, f"{name}: {verification}"
            if rank == 0: print(name, stream, verification.differences, report.bytes_read/report.bytes_total, report.seconds)
    print("right")


if __name__ == "__main__":
    {"models": models}[sys.argv[1]]()
