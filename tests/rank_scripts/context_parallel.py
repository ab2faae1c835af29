"""One rank of test_context_parallel.py. Arguments: the scenario and its arguments.

Every rank has the model of one process, too, which gets the full sequence.
"""

import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist import train
from mlxdist.nn import context_parallel, gather_sequence, plan_shards, prefill, shard_model, shard_sequence
from mlxdist.nn.models.cuts import cuts
from mlxdist.train.training_loop import masked_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

TOLERANCE = 1e-5


def tokens(batch: int, length: int, seed: int = 7) -> mx.array:
    mx.random.seed(seed)
    return mx.random.randint(1, 90, (batch, length))


def loss(model: nn.Module, inputs: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets).mean()


def close(name: str, got: mx.array, expected: mx.array, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape, (name, got.shape, expected.shape)
    error = mx.abs(got - expected).max().item()
    assert error <= tolerance * max(1.0, mx.abs(expected).max().item()), f"{name}: {error:.2g}"


def differentiated(model: nn.Module, *batch: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    value, gradients = nn.value_and_grad(model, loss)(model, *batch)
    return value, dict(tree_flatten(gradients))


def training(name: str, method: str, checkpointed: str = "") -> None:
    """The loss and the gradients, averaged over the ranks, are those of one process; also after steps."""
    whole, model = tiny_models.build(name), tiny_models.build(name)
    assert context_parallel(model, group=group, method=method) is model
    if checkpointed:
        tiny_models.checkpoint_layers(model)
    optimizers = [optim.SGD(0.1), optim.SGD(0.1)]
    for step in range(3):
        full = tokens(2, 12 * size + 1, step)
        batch = full[:, :-1], full[:, 1:]
        expected, expected_gradients = differentiated(whole, *batch)
        got, gradients = differentiated(model, *(shard_sequence(x, group=group) for x in batch))
        gradients = {path: mlxdist.all_sum(gradient) / size for path, gradient in gradients.items()}
        close("loss", mlxdist.all_sum(got) / size, expected)
        assert gradients.keys() == expected_gradients.keys()
        for path, gradient in expected_gradients.items():
            close(path, gradients[path], gradient)
        for one, optimizer, found in zip((whole, model), optimizers, (expected_gradients, gradients)):
            optimizer.update(one, tree_unflatten(list(found.items())))
            mx.eval(one.parameters())


def prefilling(name: str, method: str) -> None:
    """Logits of shards, and then what is generated from the cache."""
    whole, model = tiny_models.build(name), tiny_models.build(name)
    context_parallel(model, group=group, method=method)
    full = tokens(2, 8 * size)
    cache = [KVCache() for _ in make_prompt_cache(model)]
    logits = gather_sequence(model(shard_sequence(full, group=group), cache=cache), group=group)
    close("logits", logits, whole(full))
    for length in (4 * size + 1, 1, 30):  # of any length
        prompt = tokens(1, length + 1)[0]
        made = prefill(model, prompt[:-1], group=group)
        expected = [KVCache() for _ in make_prompt_cache(whole)]
        whole(prompt[None, :-1], cache=expected)
        for layer, other in zip(made, expected):
            assert layer.offset == other.offset == length
            for which, got, wanted in zip("kv", layer.keys_and_values(), other.keys_and_values()):
                close(which, got, wanted)
        ours = list(generate_step(prompt[-1:], model, prompt_cache=made, max_tokens=9))
        theirs = list(generate_step(prompt[-1:], whole, prompt_cache=expected, max_tokens=9))
        assert [int(token) for token, _ in ours] == [int(token) for token, _ in theirs]
        for (_, got), (_, wanted) in zip(ours, theirs):
            close("log probabilities", got, wanted, 1e-4)


def every_model(*names: str) -> None:
    """Every model file of mlx-lm: refused by an InvalidArgument, or as one process computes it."""
    wrong, equal = [], []
    for name in names or [name for name in tiny_models.model_files() if name not in tiny_models.NOT_IMPORTED]:
        try:
            whole, model = tiny_models.build(name), tiny_models.build(name)
            mx.eval(whole(tokens(1, 8)))
        except RuntimeError:  # it needs Metal
            continue
        full = tokens(1, 60 * size)  # beyond what some models have as their first window, chunk or scale
        try:
            context_parallel(model, group=group)
            got = gather_sequence(model(shard_sequence(full, group=group)), group=group)
            close(name, mx.maximum(got, -1e9), mx.maximum(whole(full), -1e9), 1e-4)
            equal.append(name)
        except mlxdist.InvalidArgument:
            continue
        except (AssertionError, AttributeError) as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, wrong
    assert len(equal) >= 60, (len(equal), equal)


def with_tensor_parallel(order: str) -> None:
    """A mesh of two by two: the same, whichever comes first."""
    mesh = mlxdist.mesh(cp=2, tp=2)
    whole, model = tiny_models.build("qwen3"), tiny_models.build("qwen3")
    changes = [
        lambda: shard_model(model, plan_shards(model, tp=2), group=mesh["tp"]),
        lambda: context_parallel(model, group=mesh["cp"]),
    ]
    for change in changes if order == "first" else changes[::-1]:
        change()
    full = tokens(2, 25)
    batch = full[:, :-1], full[:, 1:]
    expected, expected_gradients = differentiated(whole, *batch)
    got, gradients = differentiated(model, *(shard_sequence(x, group=mesh["cp"]) for x in batch))
    close("loss", mlxdist.all_sum(got, group=mesh["cp"]) / 2, expected)
    for path, gradient in gradients.items():
        mine = mlxdist.all_sum(gradient, group=mesh["cp"]) / 2
        if gradient.shape == expected_gradients[path].shape:
            close(path, mine, expected_gradients[path], 1e-4)


def plain(model: nn.Module, batch: mx.array, lengths: mx.array, cp: mlxdist.Group | None = None) -> tuple:
    """The mean over the targets, which is not a number on a rank without any."""
    steps = mx.arange(1, batch.shape[1])
    parts = [batch[:, :-1], batch[:, 1:], mx.logical_and(steps >= lengths[:, :1], steps < lengths[:, 1:])]
    if cp is not None:
        parts = [shard_sequence(part, group=cp) for part in parts]
    inputs, targets, mask = parts
    return (nn.losses.cross_entropy(model(inputs), targets) * mask).sum() / mask.sum(), mask.sum()


def masked(method: str, axis: str = "") -> None:
    """Masks that leave no, one, or all ranks of cp without targets: the loss and gradients of one process."""
    mesh = mlxdist.mesh(cp=-1, **({axis: 2} if axis else {}))
    cp, data, rows = mesh["cp"], mesh["dp", "fsdp", "cp"], 2 * mesh.size("dp") * mesh.size("fsdp")
    batch, width = tokens(rows, 48 + 1), 49
    own = slice(2 * mesh.coordinates[axis], 2 * mesh.coordinates[axis] + 2) if axis else slice(rows)
    whole, model = tiny_models.build("qwen3"), tiny_models.build("qwen3")
    context_parallel(model, group=cp, method=method)
    if axis == "fsdp":
        train.fully_shard(model, mesh=mesh)
    where = cuts(model)
    for targets in ([0, width], [width - 4, width], [20, 24], [width, width]):
        lengths = mx.array([targets] * (rows - 1) + [[targets[0], max(targets[0], targets[1] - 1)]])
        (want, count), expected = nn.value_and_grad(whole, plain)(whole, batch, lengths)
        expected = dict(tree_flatten(expected))
        for fn, micro_batches in (masked_loss, 1), (plain, 2):
            step = train.value_and_grad(model, partial(fn, cp=cp), mesh=mesh, micro_batches=micro_batches)
            (got, own_count), gradients = step(model, batch[own], lengths[own])
            sums = mlxdist.all_sum(mx.stack([mx.where(own_count > 0, got * own_count, 0), own_count]), group=data)
            assert sums[1].item() == count.item(), (targets, sums, count)
            for path, gradient in tree_flatten(gradients):
                wanted = where[path].take(expected[path])
                if wanted.size:
                    close(f"{path} {targets}", gradient, wanted if count.item() else mx.zeros_like(wanted))
            if count.item():
                close("loss", sums[0] / sums[1], want)
    if axis:
        return
    # Of a group without a mesh; and as the guide says for loops of MLX's own value_and_grad.
    lengths = mx.array([[20, 24]] * rows)
    expected = dict(tree_flatten(nn.value_and_grad(whole, plain)(whole, batch, lengths)[1]))
    by_group = train.value_and_grad(model, partial(plain, cp=cp), group=cp)(model, batch, lengths)[1]

    def share(model: nn.Module) -> mx.array:
        loss, own_count = masked_loss(model, batch, lengths, cp=cp)
        return loss * own_count / mlxdist.all_sum(own_count, group=cp)

    by_hand = nn.value_and_grad(model, share)(model)[1]
    for path, gradient in tree_flatten(by_group):
        close(path, gradient, expected[path])
        close(path, mlxdist.all_sum(dict(tree_flatten(by_hand))[path], group=cp), expected[path])


def bad_input() -> None:
    """Refused with the same words on all ranks, and the model stays as it is."""
    for name, message in [
        ("gpt2", "attn of gpt2 has no rotary embedding"),
        ("mamba2", "conv1d of mamba2 is a convolution over tokens"),
        ("rwkv7", "layer 0 of rwkv7, a Rwkv7Layer, has no attention"),
        ("gemma2", "no attention that calls mlx-lm's scaled_dot_product_attention"),
        ("ministral3", "scales queries by positions that it counts itself"),
        ("baichuan_m1", "adds the key and value before"),
    ]:
        model = tiny_models.build(name)
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(mlxdist.InvalidArgument, match=f"^context_parallel: .*{message}"):
            context_parallel(model, group=group)
        assert kinds == [type(module) for module in model.modules()]
    model = tiny_models.build("qwen3")
    with pytest.raises(mlxdist.InvalidArgument, match="method must be 'ring' or 'ulysses', not 'flash'"):
        context_parallel(model, group=group, method="flash")
    with pytest.raises(mlxdist.Mismatch, match="the ranks disagree about the arguments"):
        context_parallel(model, group=group, method=["ring", "ulysses"][rank % 2])
    if rank == size - 1:
        model.layers[1].freeze()
    with pytest.raises(
        mlxdist.Mismatch, match=r"parameter model.layers.1.*: float32 \[\d.*\d\] on rank 0, .* frozen on"
    ):
        context_parallel(model, group=group)
    model.unfreeze()
    context_parallel(model, group=group)
    with pytest.raises(mlxdist.InvalidArgument, match="is context-parallel already"):
        context_parallel(model, group=group)
    for cache in (QuantizedKVCache(), RotatingKVCache(max_size=64)):
        with pytest.raises(mlxdist.InvalidArgument, match=f"a {type(cache).__name__} cannot be filled with a shard"):
            model(tokens(1, 4), cache=[cache] * len(model.layers))
    with pytest.raises(mlxdist.InvalidArgument, match="two equal chunks"):
        model(tokens(1, 3))
    masked = context_parallel(tiny_models.build("deepseek_v3"), group=group)
    with pytest.raises(mlxdist.InvalidArgument, match="computes with the mask as an array"):
        masked(tokens(1, 4))
    for prompt, message in ([], r"shape \(0,\)"), (tokens(2, 3), r"shape \(2, 3\)"), (mx.array([rank]), "disagree"):
        with pytest.raises(mlxdist.Mismatch if message == "disagree" else mlxdist.InvalidArgument, match=message):
            prefill(model, prompt, group=group)
    with pytest.raises(TypeError if rank == 0 else mlxdist.InvalidArgument, match="'int' object is not iterable"):
        prefill(model, 7 if rank == 0 else [1, 2], group=group)
    other = tiny_models.build("qwen3")
    assert mx.array_equal(other(tokens(1, 3)), tiny_models.build("qwen3")(tokens(1, 3)))  # of the same file


run_scenario(globals())
