"""One rank of test_parallel_mlp.py. Arguments: scenarios."""

from functools import partial
from itertools import product

import comparing
import mlx.core as mx
from comparing import equal, refused
from mlx import nn
from mlx.utils import tree_flatten
from scenarios import group, rank, run_scenarios, size

from mlxdist.nn.layout.partition import shard_slice
from mlxdist.nn.tensor_parallel.parallel_mlp import ParallelMLP

close = partial(comparing.close, rtol=1e-4)
# A compiled kernel of MLX's CUDA backend (0.32.4) ends the process where an array has no elements.
EMPTY = [] if mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available() else [(0, 6)]
UNEVEN = [r + 1 for r in range(size)]
QUANTIZED = [(32, bits, "affine") for bits in (2, 3, 4, 5, 6, 8)]
QUANTIZED += [(32, 4, "mxfp4"), (16, 4, "nvfp4"), (32, 8, "mxfp8")]


class Dense(nn.Module):
    """The MLP of mlx-lm's models."""

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False, activation: object = nn.silu):
        super().__init__()
        self.gate_proj = nn.Linear(dims, hidden_dims, bias)
        self.up_proj = nn.Linear(dims, hidden_dims, bias)
        self.down_proj = nn.Linear(hidden_dims, dims, bias)
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def gradients(layer: nn.Module, loss: object, *arguments: mx.array) -> tuple[mx.array, dict, mx.array]:
    def of(parameters: dict, *arguments: mx.array) -> mx.array:
        layer.update(parameters)
        return loss(layer, *arguments)

    value, (by_parameters, by_x) = mx.value_and_grad(of, (0, 1))(layer.trainable_parameters(), *arguments)
    return value, dict(tree_flatten(by_parameters)), by_x


def mine(expected: dict[str, mx.array], layer: ParallelMLP) -> dict[str, mx.array]:
    """This rank's shards, with gate and up in one."""
    here = shard_slice(layer.sizes, rank)
    found = {}
    for name in ("weight", "bias"):
        if f"up_proj.{name}" in expected:
            both = [expected[f"{of}_proj.{name}"][here] for of in ("gate", "up")]
            found[f"gate_up_proj.{name}"] = mx.concatenate(both)
    if "down_proj.weight" in expected:
        found["down_proj.weight"] = expected["down_proj.weight"][:, here]
    if "down_proj.bias" in expected:
        found["down_proj.bias"] = expected["down_proj.bias"]
    return found


def loss_of(layer: nn.Module, x: mx.array, scale: mx.array) -> mx.array:
    return (mx.sin(layer(x)) * scale).sum()


def dense() -> None:
    mx.random.seed(1)
    cuts = [(4 * size, None), (5 * sum(UNEVEN), UNEVEN), (size, None)]
    for bias, activation, (hidden, weights) in product([False, True], [nn.silu, nn.gelu_approx], cuts):
        whole = Dense(6, hidden, bias, activation)
        layer = ParallelMLP.from_mlp(whole, activation=activation, rank_shares=weights)
        assert sum(layer.sizes) == hidden
        for shape in ((6,), (3, 6), (2, 1, 6), *EMPTY):
            x = mx.random.normal(shape)
            close(layer(x), whole(x), f"{hidden} {weights} of {shape}")
        x, scale = mx.random.normal((2, 2 * size, 6)), mx.random.normal((2, 2 * size, 6))
        value, expected, by_x = gradients(whole, loss_of, x, scale)
        found, by_parameters, by_mine = gradients(layer, loss_of, x, scale)
        close(found, value, "loss")
        close(by_mine, by_x, "gradient of x")
        parts = mine(expected, layer)
        assert by_parameters.keys() == parts.keys()
        for path, gradient in parts.items():
            close(by_parameters[path], gradient, f"gradient of {path}")
        back = dict(tree_flatten(layer.to_mlp(Dense(6, 2)).parameters()))
        for path, parameter in tree_flatten(whole.parameters()):
            equal(back[path], parameter, f"{path} back again")
        halved = ParallelMLP.from_mlp(whole, activation=activation, rank_shares=weights, sequence_parallel=True)
        here = slice(2 * rank, 2 * rank + 2)
        close(halved(x[:, here]), whole(x)[:, here], "sequence parallel")
        _, by_parameters, by_mine = gradients(halved, loss_of, x[:, here], scale[:, here])
        close(by_mine, by_x[:, here], "gradient of x, sequence parallel")
        for path, gradient in parts.items():
            close(by_parameters[path], gradient, f"gradient of {path}, sequence parallel")


def collectives() -> None:
    """One all_sum forward, one backward, the same compiled."""
    mx.random.seed(2)
    whole = Dense(6, 4 * size)
    layer = ParallelMLP.from_mlp(whole)
    x = mx.random.normal((3, 6))
    compiled = mx.compile(layer)
    for function, expected in ((layer, 1), (compiled, 1), (mx.value_and_grad(lambda x: layer(x).sum()), 2)):
        before = group.stats()["collectives"]
        result = function(x)
        mx.eval(result)
        assert group.stats()["collectives"] - before == (expected if size > 1 else 0)
        if expected == 1:
            close(result, whole(x), "MLP")


def quantized() -> None:
    mx.random.seed(3)
    for number, (group_size, bits, mode) in enumerate(QUANTIZED):
        hidden, weights = (32 * size, None) if number % 2 else (32 * sum(UNEVEN), UNEVEN)
        whole = Dense(64, hidden, bias=number % 3 == 0)
        nn.quantize(whole, group_size, bits, mode=mode)
        layer = ParallelMLP.from_mlp(whole, rank_shares=weights)
        x, what = mx.random.normal((3, 64)), f"{group_size} {bits} {mode}"
        close(layer(x), whole(x), f"quantized {what}")
        _, expected, by_x = gradients(whole, loss_of, x, x)
        _, by_parameters, by_mine = gradients(layer, loss_of, x, x)
        close(by_mine, by_x, f"gradient of x, {what}")
        parts = mine(expected, layer)
        assert by_parameters.keys() == parts.keys()
        for path, gradient in parts.items():
            close(by_parameters[path], gradient, f"gradient of {path}, {what}")
        back = dict(tree_flatten(layer.to_mlp(Dense(64, 2)).parameters()))
        for path, parameter in tree_flatten(whole.parameters()):
            equal(back[path], parameter, f"{path} back again, {what}")
    mx.random.seed(4)
    mine_alone = ParallelMLP(64, 32 * size)
    nn.quantize(mine_alone, 32, 4)
    again = mine_alone.to_mlp(Dense(64, 2))
    close(mine_alone(x), again(x), "quantized after it was sharded")


def bad_input() -> None:
    mx.random.seed(9)
    odd = size - 1  # the only rank whose argument is wrong
    right = Dense(64, 32 * size)
    extra, mixed, unequal = Dense(64, 32 * size), Dense(64, 32 * size), Dense(64, 32 * size)
    extra.norm = nn.RMSNorm(64)
    mixed.gate_proj = mixed.gate_proj.to_quantized(32, 4)
    unequal.up_proj = nn.Linear(64, 8)
    for words, wrong in [
        ("has no gate_proj", nn.Linear(3, 3)),
        ("has other parameters, too: norm", extra),
        ("gate_proj and up_proj cannot become one matrix", mixed),
        ("they are not those of one MLP", unequal),
    ]:
        for given in (wrong, wrong if rank == odd else right):
            refused(words, lambda given=given: ParallelMLP.from_mlp(given))
    refused("hidden_dims must be a positive integer", lambda: ParallelMLP(6, 0 if rank == odd else 4 * size))
    refused("activation must be a function", lambda: ParallelMLP(6, 4 * size, activation=3 if rank == odd else nn.silu))
    refused("rank_shares must be", lambda: ParallelMLP(6, 4 * size, rank_shares=[1] * (size + 1)))
    if size > 1:
        refused("disagree about the arguments", lambda: ParallelMLP(6, 4 * size * (1 + (rank == odd))))
        refused("cannot be split into", lambda: ParallelMLP(6, 4 * size + 1))
        whole = Dense(64, 32 * (size + 1))
        nn.quantize(whole, 32, 4)
        refused("quantization groups of 32", lambda: ParallelMLP.from_mlp(whole))
    layer = ParallelMLP.from_mlp(right)
    refused("is no MLP", lambda: layer.to_mlp(nn.Linear(3, 3) if rank == odd else right))
    close(layer(mx.ones((2, 64))), right(mx.ones((2, 64))), "the ranks are still in step")


run_scenarios(globals())
