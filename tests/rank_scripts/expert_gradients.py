"""One rank of test_expert_gradients.py. Arguments: the first seed and the one after the last. Prints "right".

Each seed is a case: how the tokens are routed and shared, what is differentiated, and what is evaluated in which order.
Every rank computes the dense layer on all tokens by itself, and counts the collectives of its own.
"""

import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference_moe as reference

import mlxdist
from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU

group = mlxdist.init()
rank, size = group.rank(), group.size()
HIDDEN, INNER = 8, 6
# Collectives of a layer without and with scores, forward and backward. Forward, one compares the ranks.
COUNTS = {
    ("dispatch", "sharded"): ((4, 2), (5, 3)),
    ("gather", "sharded"): ((4, 2), (5, 3)),
    ("replicated", "sharded"): ((4, 2), (5, 3)),
    ("dispatch", "replicated"): ((4, 3), (5, 5)),
    ("gather", "replicated"): ((3, 1), (3, 2)),
    ("replicated", "replicated"): ((2, 1), (2, 2)),
}


class Case(NamedTuple):
    """What a seed stands for; the same on all ranks."""

    mode: str
    placed: str
    counts: list[int]  # tokens of each rank; replicated: of all
    top_k: int
    experts: int
    layers: int
    routing: str
    scores: bool
    linear: bool  # whether the loss is: then no cotangent depends on a result
    differentiated: tuple[str, ...]
    evaluated: str
    compiled: bool


def drawn(seed: int) -> Case:
    random = np.random.default_rng([seed, size])
    placed = str(random.choice(["sharded", "sharded", "sharded", "replicated"]))
    counts = [int(n) for n in random.choice([0, 0, 1, 2, 7], size)]
    counts[int(random.integers(size))] += 3
    mode = str(random.choice(["dispatch", "dispatch", "dispatch", "gather", "replicated"]))
    compiled = mode != "dispatch" and bool(random.integers(2))
    if placed == "replicated" or compiled:
        counts = [int(random.integers(1, 9))] * size
    selected = random.integers(1, 8)
    experts = int(random.integers(max(2, size), 2 * size + 3))
    return Case(
        mode,
        placed,
        counts,
        top_k=int(random.integers(1, 3)),
        experts=experts,
        layers=int(random.integers(1, 3)),
        routing=str(random.choice(["random", "one", "none", "first rank", "own rank"])),
        scores=bool(random.integers(2)),
        linear=bool(random.integers(2)),
        differentiated=tuple(n for bit, n in enumerate(("parameters", "x", "scores")) if selected >> bit & 1),
        evaluated=str(random.choice(["together", "gradients", "gradients first", "one by one"])),
        compiled=compiled,
    )


def routed(case: Case, owner: int, layer: int, placement: object) -> np.ndarray:
    tokens, seed = case.counts[owner], [owner, layer, case.top_k]
    if case.routing in ("first rank", "own rank"):
        there = placement.local(0 if case.routing == "first rank" or case.placed == "replicated" else owner)
        return np.random.default_rng(seed).choice(np.array(there), (tokens, case.top_k))
    return reference.routing(case.routing, tokens, case.top_k, case.experts, seed)


def check(case: Case) -> None:
    mx.random.seed(zlib.crc32(repr(case).encode()))
    switches = [SwitchGLU(HIDDEN, INNER, case.experts, bias=True) for _ in range(case.layers)]
    layers = [
        ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=case.mode, tokens=case.placed)
        for switch in switches
    ]
    owners = range(size) if case.placed == "sharded" else range(1)
    indices = [
        np.concatenate([routed(case, owner, number, layer.placement) for owner in owners])
        for number, layer in enumerate(layers)
    ]
    tokens = len(indices[0])
    x, cotangent = mx.random.normal((tokens, HIDDEN)), mx.random.normal((tokens, HIDDEN))
    scores = [mx.random.normal((tokens, case.top_k)) for _ in layers]
    first = sum(case.counts[:rank]) if case.placed == "sharded" else 0
    mine = slice(first, first + case.counts[rank])
    dense = [lambda x, i, s, switch=switch: (switch(x, i) * s[..., None]).sum(-2) for switch in switches]
    part = [
        layer if case.scores else lambda x, i, s, layer=layer: (layer(x, i) * s[..., None]).sum(-2) for layer in layers
    ]
    everything = slice(0, tokens)
    want_value, want = gradients(case, switches, dense, everything, indices, x, scores, cotangent, count=False)
    value, got = gradients(case, layers, part, mine, indices, x, scores, cotangent, count=True)
    if case.placed == "sharded":
        value = mlxdist.all_sum(value, group=group)
    near(value, want_value, (case, "loss"), least=1)  # a sum in which terms of about 1 cancel out
    for name in case.differentiated:
        if name == "x":
            near(got[name], want[name][mine], (case, name))
        elif name == "scores":
            for one, whole in zip(got[name], want[name]):
                near(one, whole[mine], (case, name))
        else:
            local = layers[0].placement.local(rank)
            for (path, gradient), (_, whole) in zip(tree_flatten(got[name]), tree_flatten(want[name])):
                near(gradient, whole[local.start : local.stop], (case, path))


def gradients(
    case: Case, modules: list, functions: list, mine: slice, indices: list, x: mx.array, scores: list,
    cotangent: mx.array, count: bool,
) -> tuple[mx.array, dict]:  # fmt: skip
    """The loss and its gradients, evaluated as the case wants it; the shards are those of ``mine``."""
    indices = [mx.array(one[mine]) for one in indices]
    cotangent = cotangent[mine]
    fixed = {"x": x[mine], "scores": [one[mine] for one in scores]}
    fixed["parameters"] = [module.parameters() for module in modules]
    mx.eval(fixed, cotangent, indices)

    def loss(given: dict) -> mx.array:
        inputs = fixed | given
        for module, parameters in zip(modules, inputs["parameters"]):
            module.update(parameters)
        y = inputs["x"]
        for number, function in enumerate(functions):
            y = y + function(y, indices[number], inputs["scores"][number])
        return ((y if case.linear else mx.sin(y)) * cotangent).sum()

    differentiate = mx.value_and_grad(loss)
    if case.compiled and count:
        differentiate = mx.compile(differentiate)
    before = group.stats()["collectives"]
    value, got = differentiate({name: fixed[name] for name in case.differentiated})
    arrays = [array for _, array in tree_flatten(got)]
    if case.evaluated == "together":
        mx.eval(value, arrays)
    elif case.evaluated == "one by one":
        for array in arrays[:: -1 if case.linear else 1]:
            mx.eval(array)
    else:
        mx.eval(arrays)
    carried_out = group.stats()["collectives"] - before
    if count:
        expected = collectives(case) if size > 1 else 0
        all_ranks = mlxdist.all_gather(np.array([carried_out])).tolist()
        assert all_ranks == [expected] * size, f"{case}: {all_ranks} collectives on the ranks, expected {expected}"
    mx.eval(value)
    for module, parameters in zip(modules, fixed["parameters"]):
        module.update(parameters)
    return value, got


def collectives(case: Case) -> int:
    """How many a rank carries out, which depends on nothing but the kind of the case."""
    forward, backward = COUNTS[case.mode, case.placed][case.scores]
    reached = {"x", "scores"} if case.scores else {"x"}
    if case.mode == "dispatch" or case.placed == "sharded":
        reached.add("parameters")  # otherwise their gradients need no collective
    first_has_gradients = bool(reached & set(case.differentiated))
    return case.layers * forward + (case.layers - 1 + first_has_gradients) * backward


def near(got: mx.array, want: mx.array, what: object, least: float = 1e-2) -> None:
    assert got.shape == want.shape, f"{what} on rank {rank}: shape {got.shape}, expected {want.shape}"
    if got.size:
        error, scale = mx.abs(got - want).max().item(), max(least, mx.abs(want).max().item())
        assert error <= 2e-5 * scale, f"{what} on rank {rank}: off by {error:.2e} of {scale:.2e}"


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        check(drawn(seed))
    print("right")
