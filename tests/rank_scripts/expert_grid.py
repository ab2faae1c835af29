"""One rank of the grids of tests/nn/test_expert_parallel.py. Arguments: scenarios."""

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from expert_parallel import MODES, glu_with_bias, mlp, near, normal
from mlx import nn
from mlx.utils import tree_flatten
from scenarios import group, rank, run_scenarios, size

from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU


def grid() -> None:
    """Experts over one group, the inside of each over another: all grids of this many ranks."""
    mx.random.seed(9)
    for tp in (n for n in range(1, size + 1) if size % n == 0):
        ep_group, tp_group = group.split(rank % tp), group.split(rank // tp)
        assert (ep_group.size(), tp_group.size()) == (size // tp, tp)
        for make, bits in itertools.product((glu_with_bias, mlp), (None, 4)):
            inner = 32 * 12
            switch = make(6, 64, inner)
            if bits:
                nn.quantize(switch, 32, bits)
            for mode, placed in itertools.product(MODES, ("replicated", "sharded")):
                owner = ep_group.rank() if placed == "sharded" else 0
                random = np.random.default_rng(owner)
                x = mx.array(random.standard_normal((5 + owner, 64)).astype(np.float32))
                scores = mx.array(random.random((5 + owner, 2)).astype(np.float32))
                indices = mx.array(random.integers(0, 6, (5 + owner, 2)))
                layer = ExpertParallelSwitchGLU.from_switch(
                    switch, group=ep_group, mode=mode, tokens=placed, tp_group=tp_group
                )
                what = (make.__name__, bits, mode, placed, tp)
                want = switch(x, indices)
                near(layer(x, indices), want, what)
                near(layer(x, indices, scores), (want * scores[..., None]).sum(-2), what)
                if ep_group.size() == 1 and mode == "replicated":
                    layer.host_sync = False
                    near(layer(x, indices, scores), (want * scores[..., None]).sum(-2), (*what, "unsynced"))
                    layer.host_sync = True
                if bits is None:
                    grid_gradients(layer, switch, x, indices, scores, what)
            if tp > 1:
                half = sum(a.nbytes for _, a in tree_flatten(layer.parameters()))
                assert half < 1.02 * sum(a.nbytes for _, a in tree_flatten(switch.parameters())) / size + 4096
            back = layer.to_switch()
            for (name, array), (_, original) in zip(tree_flatten(back.parameters()), tree_flatten(switch.parameters())):
                assert mx.array_equal(array, original), f"{what}: {name}"


def thin() -> None:
    """One grid: the inside of the experts over all ranks."""
    mx.random.seed(9)
    switch = glu_with_bias(4, 8, 6)
    x, scores = normal(5, 8), mx.random.uniform(shape=(5, 2))
    indices = mx.random.randint(0, 4, (5, 2))
    ep_group = group.split(rank)
    for mode, placed in itertools.product(MODES, ("replicated", "sharded")):
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=ep_group, mode=mode, tokens=placed, tp_group=group)
        grid_gradients(layer, switch, x, indices, scores, (mode, placed))


def grid_gradients(
    layer: ExpertParallelSwitchGLU, switch: nn.Module, x: mx.array, indices: mx.array, scores: mx.array, what: tuple
) -> None:
    """Of tokens and scores; with experts whole in one rank's grid row also those of the parameters."""

    def gradients(module: nn.Module, function: Callable[..., mx.array]) -> tuple[dict, mx.array, mx.array]:
        def loss(parameters: dict, x: mx.array, scores: mx.array) -> mx.array:
            module.update(parameters)
            return mx.sin(function(x, scores)).sum()

        own = module.parameters()
        found = mx.grad(loss, argnums=(0, 1, 2))(own, x, scores)
        mx.eval(found)
        module.update(own)
        return found

    got = gradients(layer, lambda x, s: layer(x, indices, s))
    want = gradients(switch, lambda x, s: (switch(x, indices) * s[..., None]).sum(-2))
    near(got[1], want[1], (*what, "gradient of x"))
    near(got[2], want[2], (*what, "gradient of scores"))
    if layer.placement.ranks > 1:
        return  # others' tokens add to them
    sizes = layer._sharding.hidden_sizes
    first = sum(sizes[: layer._sharding.tp_group.rank()]) if layer._sharding.tp_group else 0
    inside = slice(first, first + sizes[layer._sharding.tp_group.rank() if layer._sharding.tp_group else 0])
    for (path, gradient), (_, whole) in zip(tree_flatten(got[0]), tree_flatten(want[0])):
        name, array = path.split(".")
        if name not in ("down_proj", "fc2"):
            whole = whole[:, inside]
        elif array == "weight":
            whole = whole[:, :, inside]
        near(gradient, whole, (*what, path))


run_scenarios(globals())
