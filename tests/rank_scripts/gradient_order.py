"""One rank of test_gradient_order.py. Arguments: the scenario and its arguments."""

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from scenarios import group, run_scenario
from training import TOKENS, differences, fields_of, loss

import mlxdist
import mlxdist.nn
from mlxdist.nn.models.plan import Plan, plan_shards, shard_model
from mlxdist.nn.models.plan.shard_model import why_not_trained
from mlxdist.train import clip_grad_norm

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

Gradients = dict[str, mx.array]


def sharded(name: str, heads: str) -> tuple[nn.Module, Plan] | None:
    """None where a gradient of it is rejected, which test_training.py looks at."""
    model = tiny_models.build(name, **fields_of(heads))
    plan = plan_shards(model, tp=group.size())
    return None if why_not_trained(model, plan) else (shard_model(model, plan, group=group), plan)


def step(model: nn.Module) -> tuple[mx.array, Gradients]:
    """The norm, and the loss with the gradients."""
    value, gradients = nn.value_and_grad(model, loss)(model, mx.array(TOKENS))
    _, norm = clip_grad_norm(gradients, 1.0, model=model)
    return norm, {"the loss": value, **dict(tree_flatten(gradients))}


def at_once(model: nn.Module) -> tuple[mx.array, Gradients]:
    norm, found = step(model)
    mx.eval(found, norm)
    return norm, found


def norm_first(model: nn.Module) -> tuple[mx.array, Gradients]:
    norm, found = step(model)
    mx.eval(norm)
    return norm, found


def in_subsets(model: nn.Module, seed: int = 0) -> tuple[mx.array, Gradients]:
    """In random subsets, the same on all ranks."""
    norm, found = step(model)
    arrays, draw = [norm, *found.values()], random.Random(seed)
    draw.shuffle(arrays)
    while arrays:
        size = draw.randint(1, 5)
        mx.eval(arrays[:size])
        arrays = arrays[size:]
    return norm, found


def compiled(model: nn.Module) -> tuple[mx.array, Gradients]:
    norm, found = mx.compile(lambda: step(model), inputs=model.state, outputs=model.state)()
    mx.eval(norm)
    return norm, found


Way = Callable[[nn.Module], tuple[mx.array, Gradients]]


def wrong(name: str, heads: str, ways: Sequence[Way]) -> Iterator[str]:
    """Whichever gradients are evaluated first, they are those of one process."""
    if (made := sharded(name, heads)) is None:
        return
    model, plan = made
    whole = tiny_models.build(name, **fields_of(heads))
    expected_norm, expected = at_once(whole)
    for way in ways:
        norm, found = way(model)
        if some := list(differences(found, expected, plan)):
            yield f"{name}, {way.__name__}: {', '.join(some[:6])}"
        if not abs(norm.item() / expected_norm.item() - 1) < 1e-4:
            yield f"{name}, {way.__name__}: the norm is {norm.item()}, not {expected_norm.item()}"


def values(heads: str, *names: str, ways: Sequence[Way] = (at_once, norm_first, in_subsets)) -> None:
    found = [text for name in names for text in wrong(name, heads, ways)]
    assert not found, "; ".join(found)


def values_compiled(heads: str, *names: str) -> None:
    values(heads, *names, ways=(compiled,))


def graphs(heads: str, *names: str) -> None:
    """The graphs of all ranks are alike, also where parameters are still lazy, so that MLX evaluates them in one
    order."""
    different = []
    for name in names:
        made = sharded(name, heads)
        for is_lazy in (True, False) if made else ():
            if not is_lazy:
                mx.eval(made[0].parameters())
            if not alike(*step(made[0])):
                different.append(f"{name}, {'lazy' if is_lazy else 'evaluated'}")
    layers = ((6, 2), (4, 1)) if group.size() == 3 else ()
    different += [f"attention of {heads} heads" for heads in layers if not alike(*attention(*heads))]
    assert not different, different


def attention(heads: int, kv_heads: int) -> tuple[mx.array, Gradients]:
    """Of the layer by itself, where some of three ranks have one query head for each KV head, and others two."""
    mx.random.seed(0)
    norms = {"q_norm": nn.RMSNorm(16), "k_norm": nn.RMSNorm(16)}
    shares = None if heads % 3 == 0 else [2, 1, 1]
    layer = mlxdist.nn.ParallelAttention(64, heads, kv_heads, 16, rope=nn.RoPE(16), rank_shares=shares, **norms)
    value, gradients = nn.value_and_grad(layer, lambda layer, x: layer(x, "causal").square().sum())(
        layer, mx.random.normal((2, 5, 64))
    )
    _, norm = clip_grad_norm(gradients, 1.0, model=layer)
    return norm, {"the loss": value, **dict(tree_flatten(gradients))}


def alike(norm: mx.array, found: Gradients) -> bool:
    """Whether the graphs of all ranks are."""
    hashes = [digest(list(found.values())), digest(norm)]
    return len({tuple(row) for row in mlxdist.all_gather(np.array([hashes])).tolist()}) == 1


def digest(arrays: Any) -> int:
    """Of a graph as far as MLX's order of evaluation depends on it: without the kinds of operations that do not
    communicate, and whichever result of one is used: ranks take different parts of a split."""
    text = StringIO()
    mx.export_to_dot(text, arrays)
    numbers: dict[str, int] = {}
    number = lambda found: str(numbers.setdefault(found[0], len(numbers)))
    kind = lambda found: found[0] if "All" in found[0] else ""
    graph = re.sub(r"\d{6,}", number, re.sub(r'label ="[^"]*"', kind, text.getvalue()))
    made = {result: operation for operation, result in re.findall(r'(\d+) -> "(\w+)"', graph)}
    graph = re.sub(r'"(\w+)"', lambda found: made.get(found[1], found[0]), graph)
    graph = re.sub(r"\{ (rank=\w+; )?\d+; \}", "", graph)
    return int.from_bytes(blake2b(graph.encode(), digest_size=7).digest(), "little")


run_scenario(globals())
