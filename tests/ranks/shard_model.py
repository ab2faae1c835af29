"""One rank of tests/test_shard_model.py. Arguments: the scenario and its arguments. Prints "close" at the end."""

import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mlxdist
from mlxdist.nn.plan import Plan, plan_shards
from mlxdist.nn.shard_model import shard_model

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_models

group = mlxdist.init()
PROMPT = [[5, 17, 3, 60, 21, 9, 44]]
DECODED = [11, 80, 2]
# Logits are of order 1; float32 sums over the ranks come in another order.
TOLERANCE = 2e-4


def logits(model: nn.Module) -> list[np.ndarray]:
    """Of a prompt, and of some tokens after it, with a cache."""
    cache = make_prompt_cache(model)
    results = [model(mx.array(PROMPT), cache=cache)]
    for token in DECODED:
        results.append(model(mx.array([[token]]), cache=cache))
        mx.eval(results)
    # Some models forbid tokens with -inf.
    return [np.maximum(np.array(result.astype(mx.float32)), -1e9) for result in results]


def compare(name: str, **how) -> str:
    """"" if the logits of the model cut over all ranks are those of the whole one, otherwise what is wrong."""
    expected = logits(tiny_models.build(name))
    model = tiny_models.build(name)
    plan = plan_shards(model, **({"tp": group.size()} | how))
    shard_model(model, plan, group)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    if held != plan.bytes(group.rank()):
        return f"{name}: {held} bytes are held, {plan.bytes(group.rank())} planned"
    found = logits(model)
    error = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    size = max(float(np.abs(b[b > -1e9]).max()) for b in expected)
    if not (error <= TOLERANCE * max(size, 1) and size > 1e-3):
        return f"{name}: {plan.how}: logits up to {size:.3g} differ by {error:.3g}"
    return ""


def models(*names: str) -> None:
    wrong = []
    for name in names:
        started = time.time()
        try:
            message = compare(name)
        except Exception as error:
            import traceback
            message = f"{name}: {type(error).__name__}: {error} {traceback.extract_tb(error.__traceback__)[-1]}"
        if message:
            wrong.append(message)
        if group.rank() == 0: print(message or name, f"{time.time() - started:.1f} s", flush=True)
    assert not wrong, wrong


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("close")
