"""Serves a tiny model of each kind and compares the tokens with mlx-lm's of each request alone on one process.

Arguments: a directory with a tokenizer and room for files, and kinds. Prints a line for each: "KIND: served", or
what is wrong.
"""

import os
import sys
from pathlib import Path

# On CPUs MLX calls a C++ compiler for every fused kernel.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MLX_DISABLE_COMPILE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import tiny_models
from mlx_lm.utils import load_model, load_tokenizer, save_config, save_model
from overlapping import alone, overlapping

import mlxdist
from mlxdist.nn import load_sharded
from mlxdist.serve.worker import BatchLimits, Worker

group = mlxdist.init()
base = Path(sys.argv[1])
tokenizer = load_tokenizer(base)


def saved(kind: str) -> Path:
    """A directory with the model, which rank 0 streams to the others."""
    directory = base / kind
    if group.rank() == 0:
        directory.mkdir()
        save_model(directory, tiny_models.build(kind))
        save_config(tiny_models.config_of(kind) | {"model_type": kind}, directory / "config.json")
    return directory


def serve(kind: str) -> str:
    directory = saved(kind)
    model, _ = load_sharded(directory, group=group, stream=True)
    worker = Worker(model, tokenizer, BatchLimits(prefill_step_size=4))
    worker.warm_up()
    expected = alone(load_model(directory)[0])
    found, cached = overlapping(worker, expected[0])
    worker.close()
    return "served" if found == expected and cached > 0 else f"{found}, not {expected}, with {cached} from the cache"


for kind in sys.argv[2:]:
    print(f"{kind}: {serve(kind)}")
