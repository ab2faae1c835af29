"""One rank of test_expert_parallel.py, calls with few tokens. Arguments: scenarios."""

import itertools
import weakref

import mlx.core as mx
import numpy as np
from expert_parallel import HIDDEN, INNER, glu_with_bias, near, normal, refused, same_text, switch_of
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRASwitchLinear
from scenarios import group, rank, run_scenarios, size

import mlxdist
from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU
from mlxdist.nn.expert_parallel.comparisons import EVERY
from mlxdist.runtime.native import bridge


def decoding() -> None:
    """Few tokens in mode "auto": one collective a call and no comparison, but for the first and every 32nd."""
    mx.random.seed(9)
    for make, tokens in zip((plain, plain, plain, glu_with_bias, half), (1, 2, 4, 4, 2)):
        switch = make(8)
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group)
        for call in range(EVERY + 5):
            x, scores = normal(tokens, HIDDEN), mx.random.uniform(shape=(tokens, 2))
            indices = mx.random.randint(0, 8, (tokens, 2)).astype(mx.uint32 if call % 2 else mx.int64)
            if call == 9:  # the arrays that a call uses are those of the layer at that time
                switch.update(tree_map(lambda array: array * 0.5, switch.parameters()))
                layer.update(tree_map(lambda array: array * 0.5, layer.parameters()))
            mx.eval(x, scores, indices, layer.parameters())
            want = switch(x, indices)
            before = group.stats()["collectives"]
            y = layer(x, indices, scores) if call % 4 < 2 else layer(x, indices)
            mx.eval(y)
            compared = call < 4 or call == EVERY + 3  # calls look in four ways
            expected = 0 if size == 1 else 1 + compared
            carried_out = group.stats()["collectives"] - before
            assert carried_out == expected, f"{make.__name__}, call {call}: {carried_out} collectives, not {expected}"
            want = (want * scores[..., None]).sum(-2) if call % 4 < 2 else want
            near(y, want, (make.__name__, tokens, call), 2e-2 if make is half else 1e-5)


def changes() -> None:
    """Between calls, of what is no array: activation, scale of adapters, dropout. Calls keep no layer in memory."""
    mx.random.seed(10)
    x, indices = normal(2, 64), mx.array([[1, 5], [7, 0]])
    bare = SwitchGLU(64, 64, 8)
    layer = ExpertParallelSwitchGLU.from_switch(bare, group=group)
    for call in range(4):
        if call == 2:
            bare.activation = layer.activation = lambda up, gate: mx.maximum(gate, 0) * up
        near(layer(x, indices), bare(x, indices), ("activation", call))
    for scale, dropout in ((20.0, 0.0), (5.0, 0.0), (1.0, 0.5)):
        switch = SwitchGLU(64, 64, 8)
        for name in ("gate_proj", "up_proj", "down_proj"):
            switch[name] = LoRASwitchLinear.from_base(bare[name], r=4, dropout=dropout, scale=scale)
            switch[name].lora_b = normal(*switch[name].lora_b.shape)
        switch.activation = layer.activation
        other = ExpertParallelSwitchGLU.from_switch(switch, group=group)
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer[name] = other[name]
        layer.train()
        layer(x, indices), layer(x, indices)
        near(layer.eval()(x, indices), switch.eval()(x, indices), ("LoRA", scale, dropout))
    layer = ExpertParallelSwitchGLU.from_switch(bare, group=group)
    mx.eval(layer(x, indices), layer(x, indices))
    held = weakref.ref(layer)
    del layer
    assert held() is None, "a layer that is dropped stays until the garbage collector runs"


def plain(num_experts: int) -> SwitchGLU:
    return SwitchGLU(HIDDEN, INNER, num_experts)


def half(num_experts: int) -> SwitchGLU:
    switch = plain(num_experts)
    switch.set_dtype(mx.float16)
    mx.eval(switch.parameters())
    return switch


def mistakes() -> None:
    """Of routing and indices: within 32 calls one error on all ranks, and the group works on."""
    x, indices, last = mx.ones((2, HIDDEN)), mx.zeros((2, 2), mx.int32), size - 1
    cases = [("the ranks disagree about the experts of the tokens of earlier calls", indices + (rank == last))]
    cases = cases if size > 1 else []
    cases += [("indices of an earlier call are from 0 to 8", 8 * (mx.arange(2) == 1) + indices)]
    for words, wrong in cases:
        layer = ExpertParallelSwitchGLU.from_switch(switch_of(8), group=group)
        mx.eval(layer(x, indices))
        y = layer(x, wrong)
        assert mx.isnan(y).any().item() == ("indices" in words), words
        for _ in range(EVERY - 2):
            mx.eval(layer(x, indices))
        text = refused(words, lambda: layer(x, indices))
        assert same_text(text), f"rank {rank} says {text}"
        near(layer(x, indices), switch_of(8)(x, indices), "afterwards")


def shapes() -> None:
    """Another number of tokens on one rank, between two comparisons: the engine's error on all, at once."""
    x, indices = mx.ones((2, HIDDEN)), mx.zeros((2, 2), mx.int32)
    layer = ExpertParallelSwitchGLU.from_switch(switch_of(8), group=group)
    mx.eval(layer(x, indices))
    tokens = 1 if rank == size - 1 else 2
    try:
        mx.eval(layer(x[:tokens], indices[:tokens]))
    except mlxdist.Mismatch:
        return
    assert size == 1, "no error"


def products() -> None:
    """Of rows by the matrices of experts, whatever lies behind one another in memory."""
    weights, experts = normal(3, 5, 7), mx.array([[0, 2, 3], [1, 9, 0]], mx.uint32)
    kinds = [weights, mx.contiguous(weights.swapaxes(1, 2)).swapaxes(1, 2), normal(3, 10, 14)[:, ::2, ::2]]
    for array, wide in itertools.product(kinds, (1, 3)):
        rows = normal(2, wide, 7)
        got = np.array(bridge.expert_matmul(rows, array, experts))
        for t, j in itertools.product(range(2), range(3)):
            expert, row = int(experts[t, j].item()), np.array(rows)[t, j % wide]
            want = np.array(array)[expert] @ row if expert < 3 else np.zeros(5)
            assert np.allclose(got[t, j], want, atol=1e-5)


run_scenarios(globals())
