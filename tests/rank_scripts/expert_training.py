"""One rank of test_expert_gradients.py. Arguments: scenarios."""

import io
import itertools
import re

import mlx.core as mx
from expert_gradients import Case, check
from expert_parallel import MODES, TOLERANCE, glu_with_bias, near, normal
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from scenarios import group, rank, run_scenarios, size

from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU, checkpoint

# Operations in the forward graph of one token with two experts and scores: those of the layer before it had stages.
OPERATIONS = {
    ("replicated", "replicated"): 27,
    ("replicated", "sharded"): 43,
    ("gather", "replicated"): 34,
    ("gather", "sharded"): 42,
    ("dispatch", "replicated"): 56,
    ("dispatch", "sharded"): 54,
}


def operations() -> None:
    """What a call costs where no gradient is asked for. With one, it has its stages, the same on every rank."""
    switch = SwitchGLU(16, 8, 2 * size)
    x, indices, scores = mx.ones((1, 16)), mx.array([[0, 2 * size - 1]]), mx.array([[0.5, 0.5]])
    for (mode, placed), most in OPERATIONS.items():
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode, tokens=placed)
        mx.eval(layer.parameters(), layer(x, indices, scores))
        y = layer(x, indices, scores)
        graph = io.StringIO()
        mx.export_to_dot(graph, y)
        found = re.findall(r'label ?="([A-Za-z][\w ]*)"[^\n]*rectangle', graph.getvalue())
        mx.eval(y)
        assert "CustomTransforms" not in found, (mode, placed)
        assert len(found) <= most, f"{mode}, {placed}: {len(found)} operations, at most {most} expected"


def idle() -> None:
    """Two layers of which only the parameters are trained, where all tokens go to the first rank."""
    for mode, scores in itertools.product(("replicated", "gather"), (False, True)):
        case = Case(
            mode, "replicated", [4] * size, top_k=2, experts=2 * size, layers=2, routing="first rank", scores=scores,
            linear=False, differentiated=("parameters",), evaluated="gradients", compiled=False,
        )  # fmt: skip
        check(case)


def exchanged() -> None:
    """Gradients where tokens travel in other dtypes: those of the dense layer, as exactly as the dtype allows."""
    mx.random.seed(3)
    switch = glu_with_bias(2 * size, 16, 8)
    x, scores = normal(7, 16), mx.random.uniform(shape=(7, 2))
    indices = mx.random.randint(0, 2 * size, (7, 2))
    own = [slice(0, 7)] + [slice(7, 7)] * (size - 1)
    want = mx.grad(lambda x, s: mx.sin((switch(x, indices) * s[..., None]).sum(-2)).sum(), argnums=(0, 1))(x, scores)
    for mode, placed, name in itertools.product(MODES, ("replicated", "sharded"), ("float16", "bfloat16", "fp8")):
        mine = slice(0, 7) if placed == "replicated" else own[rank]
        dtype = name if name == "fp8" else getattr(mx, name)
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode, tokens=placed, exchange_dtype=dtype)
        got = mx.grad(lambda x, s: mx.sin(layer(x, indices[mine], s)).sum(), argnums=(0, 1))(x[mine], scores[mine])
        mx.eval(got)
        for one, whole, what in zip(got, want, ("x", "scores")):
            assert one.dtype == mx.float32
            near(one, whole[mine], (mode, placed, name, what), 2 * TOLERANCE[name])


def checkpointed() -> None:
    """Layers that are computed a second time in the backward pass, where ranks have other tokens or other pairs."""
    mx.random.seed(0)
    switches = [glu_with_bias(2 * size, 8, 6) for _ in range(2)]
    x, scores = normal(6, 8), normal(6, 2)
    indices = [mx.random.randint(0, most, (6, 2)) for most in (2, 2 * size)]

    def gradients(modules: list, x: mx.array, scores: mx.array, parts: list, dense: bool) -> tuple:
        def one(module: nn.Module, parameters: dict, given: tuple, scores: mx.array, selected: mx.array) -> dict:
            module.update(parameters)
            y = given[0] + (
                (module(given[0], selected) * scores[..., None]).sum(-2)
                if dense
                else module(given[0], selected, scores)
            )
            return {"y": y}

        def loss(parameters: list, x: mx.array, scores: mx.array) -> mx.array:
            step = one if dense else checkpoint(one)
            for module, own, selected in zip(modules, parameters, parts):
                x = step(module, own, (x,), selected=selected, scores=scores)["y"]
            return mx.sin(x).sum()

        parameters = [module.parameters() for module in modules]
        found = mx.grad(loss, argnums=(0, 1, 2))(parameters, x, scores)
        mx.eval(found)
        for module, own in zip(modules, parameters):
            module.update(own)
        return found

    want = gradients(switches, x, scores, indices, True)
    for mode, placed in itertools.product(MODES, ("replicated", "sharded")):
        mine = slice(0, 6) if placed == "replicated" or rank == 0 else slice(6, 6)
        layers = [ExpertParallelSwitchGLU.from_switch(one, group=group, mode=mode, tokens=placed) for one in switches]
        got = gradients(layers, x[mine], scores[mine], [selected[mine] for selected in indices], False)
        near(got[1], want[1][mine], (mode, placed, "x"))
        near(got[2], want[2][mine], (mode, placed, "scores"))
        local = layers[0].placement.local(rank)
        for (path, gradient), (_, whole) in zip(tree_flatten(got[0]), tree_flatten(want[0])):
            near(gradient, whole[local.start : local.stop], (mode, placed, path))


run_scenarios(globals())
