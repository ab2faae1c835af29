"""One rank of test_fully_shard.py: `check` is the name of a function below."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist.nn.models.cuts import cuts
from mlxdist.train import fully_shard, value_and_grad
from mlxdist.train.fully_shard.unit import UnitChannel

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from reference_zero import Zero


class Block(nn.Module):
    """Parameters of all kinds: a scalar, a vector shorter than there are ranks, some in a list, of a module with others
    in it."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dims, 3 * dims + 1), nn.Linear(3 * dims + 1, dims, bias=False)
        self.norm, self.conv = nn.RMSNorm(dims), nn.Conv1d(dims, dims, 3, padding=1, groups=dims)
        self.scale = mx.array(0.7)
        self.shifts = [mx.array([0.1]), {"inner": mx.zeros((1, dims))}]

    def __call__(self, x: mx.array, mask: mx.array | None = None, *, twice: bool = False) -> mx.array:
        y = self.down(nn.gelu(self.up(self.norm(x)))) + self.shifts[0] + self.shifts[1]["inner"]
        y = self.conv(y) * self.scale
        return x + (y if mask is None else y * mask)


class Model(nn.Module):
    """Tied embeddings, a norm that two blocks share, and parameters of its own."""

    def __init__(self, dims: int = 5, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(17, dims), 0.1 * mx.ones((6, dims))
        self.layers = [Block(dims) for _ in range(layers)]
        self.layers[2].norm = self.layers[0].norm
        self.norm = nn.LayerNorm(dims)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens) + self.positions
        mask = (tokens > 1)[..., None].astype(x.dtype)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.embed.as_linear(self.norm(x))


def loss_of(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens).astype(mx.float32), targets, reduction="mean")


def pair(make: Any = Model, seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """Two models with the same parameters."""
    models = []
    for _ in range(2):
        mx.random.seed(seed)
        models.append(make())
        mx.eval(models[-1].parameters())
    return models[0], models[1]


def batch(seed: int, rows: int = 2, length: int = 6, tokens: int = 17) -> tuple[mx.array, mx.array]:
    """Of all ranks."""
    key = mx.random.key(seed)
    whole = mx.random.randint(0, tokens, (2, rows * size, length), key=key)
    return whole[0], whole[1]


def mine(array: mx.array) -> mx.array:
    rows = array.shape[0] // size
    return array[rank * rows : (rank + 1) * rows]


def require_equal(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5, tree: Any = None) -> None:
    """What each rank holds is its part of the full one."""
    expected = dict(tree_flatten(tree if tree is not None else reference.parameters()))
    for path, cut in cuts(model).items():
        array = dict(tree_flatten(model.parameters()))[path]
        want = cut.take(expected[path])
        assert array.shape == want.shape, (path, array.shape, want.shape)
        assert mx.allclose(array, want, rtol=tolerance, atol=tolerance).item(), (path, mx.abs(array - want).max())


def train(model: nn.Module, reference: nn.Module, steps: int = 4, tolerance: float = 1e-5, **data: int) -> None:
    """Both alike: the reference as the plain ZeRO, with as many ranks in this process."""
    # Adam divides by the gradient's size: a large eps keeps what is rounding in a gradient of zero.
    make = partial(optim.AdamW, 1e-2, eps=1e-4)
    ours, zero, step = make(), Zero(reference, size, make), nn.value_and_grad(model, loss_of)
    for seed in range(steps):
        tokens, targets = batch(seed, **data)
        loss, gradients = step(model, mine(tokens), mine(targets))
        expected, shards = zero.gradients(loss_of, list(zip(mx.split(tokens, size), mx.split(targets, size))))
        mean = mlxdist.all_sum(loss) / size
        assert abs(mean.item() - expected.item()) < tolerance * 10, (seed, mean, expected)
        ours.update(model, gradients)
        zero.update(shards)
        mx.eval(model.parameters(), ours.state)
    require_equal(model, reference, tolerance)


def like_one_process() -> None:
    for options in ({}, {"stage": 1}, {"stage": 2}, {"reshard_after_forward": False}, {"prefetch": 0}, {"prefetch": 2}):
        reference, model = pair()
        kind, paths = type(model.layers[0]), list(dict(tree_flatten(model.parameters())))
        assert fully_shard(model, **options) is model
        assert isinstance(model, Model) and isinstance(model.layers[0], kind)
        assert list(dict(tree_flatten(model.parameters()))) == paths
        if size > 1:
            held = sum(array.size for _, array in tree_flatten(model.parameters()))
            full = sum(array.size for _, array in tree_flatten(reference.parameters()))
            assert held < full / size + 10 * size, (held, full)
        require_equal(model, reference)
        train(model, reference)
        tokens, _ = batch(9)
        assert mx.allclose(model(tokens), reference(tokens), rtol=1e-4, atol=1e-4).item()


def blocks_alone() -> None:
    """As MLX's is used: block by block, without the model."""
    reference, model = pair(partial(Model, layers=4))
    model.layers[2].norm = nn.RMSNorm(5)
    reference.layers[2].norm = nn.RMSNorm(5)
    for layer in model.layers:
        assert fully_shard(layer) is layer
    fully_shard(model.embed)
    ours, theirs = nn.value_and_grad(model, loss_of), nn.value_and_grad(reference, loss_of)
    tokens, targets = batch(1)
    _, gradients = ours(model, mine(tokens), mine(targets))
    _, whole = theirs(reference, tokens, targets)
    expected = dict(tree_flatten(whole))
    layout = cuts(model)
    for path, gradient in tree_flatten(gradients):
        if path.startswith(("layers", "embed")):
            assert mx.allclose(gradient, layout[path].take(expected[path]), rtol=1e-5, atol=1e-6).item(), path
    step = value_and_grad(model, loss_of)
    ours, theirs = optim.SGD(0.1), optim.SGD(0.1)
    for seed in range(3):
        tokens, targets = batch(seed)
        _, gradients = step(model, mine(tokens), mine(targets))
        _, whole = nn.value_and_grad(reference, loss_of)(reference, tokens, targets)
        ours.update(model, gradients)
        theirs.update(reference, whole)
        mx.eval(model.parameters(), reference.parameters())
        assert mx.allclose(model(tokens), reference(tokens), rtol=1e-4, atol=1e-4).item()
    require_equal(model, reference)
    fully_shard(model)  # the rest
    require_equal(model, reference)
    train(model, reference)


def compute_dtypes() -> None:
    for dtype in (mx.bfloat16, mx.float16):
        reference, model = pair()
        fully_shard(model, compute_dtype=dtype)
        tokens, targets = batch(1)
        assert model(tokens).dtype == dtype or size == 1
        _, gradients = nn.value_and_grad(model, loss_of)(model, mine(tokens), mine(targets))
        _, whole = nn.value_and_grad(reference, loss_of)(reference, tokens, targets)
        expected = dict(tree_flatten(whole))
        for path, cut in cuts(model).items():
            gradient = dict(tree_flatten(gradients))[path]
            assert gradient.dtype == mx.float32
            want = cut.take(expected[path])
            assert mx.allclose(gradient, want, rtol=0.1, atol=0.02).item(), (path, gradient, want)


def low_rank_adapters() -> None:
    """On a frozen base, also a quantized one, of which no gradient is sent."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from tiny_models import build

    for quantized in (False, True):

        def make(quantized: bool = quantized) -> nn.Module:
            model = build("qwen3")
            if quantized:
                can = lambda path, layer: hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0
                nn.quantize(model, group_size=32, bits=4, class_predicate=can)
            model.freeze()
            linear_to_lora_layers(model, 8, {"rank": 2, "scale": 4.0, "dropout": 0.0})
            # lora_b begins as zeros
            for path, module in model.named_modules():
                if "lora_b" in module:
                    module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape)
            return model

        reference, model = pair(make)
        fully_shard(model)
        adapters = dict(tree_flatten(model.trainable_parameters()))
        assert adapters and all(array.ndim == 2 for array in adapters.values())
        train(model, reference, tolerance=1e-4)
        if size > 1:
            frozen = [array for path, array in tree_flatten(model.parameters()) if path not in adapters]
            assert all(array.ndim == 1 for array in frozen)
        # With a batch that is no argument of the function, what comes before the first adapter has no gradient at all.
        tokens, targets = (mine(array) for array in batch(9))
        _, expected = nn.value_and_grad(model, loss_of)(model, tokens, targets)
        _, found = nn.value_and_grad(model, lambda: loss_of(model, tokens, targets))()
        expected, found = dict(tree_flatten(expected)), dict(tree_flatten(found))
        assert all(mx.allclose(found[path], array, rtol=1e-4, atol=1e-5).item() for path, array in expected.items())
        counted = value_and_grad(model, lambda model, *batch: (loss_of(model, *batch), 12))
        averages = dict(tree_flatten(counted(model, tokens, targets)[1]))
        assert all(mx.allclose(averages[path], array, rtol=1e-4, atol=1e-5).item() for path, array in expected.items())


class Routed(nn.Module):
    """A router that returns which of the outputs each row takes, and no scores."""

    class Router(nn.Module):
        def __init__(self, dims: int) -> None:
            super().__init__()
            self.weight = mx.random.normal((dims, 2))

        def __call__(self, x: mx.array) -> mx.array:
            return mx.argmax(x @ self.weight, axis=-1, keepdims=True)

    def __init__(self, dims: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, dims)
        self.router, self.first, self.second = self.Router(dims), nn.Linear(dims, 17), nn.Linear(dims, 17)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        return mx.where(self.router(x) == 0, self.first(x), self.second(x))


def results_without_gradients() -> None:
    reference, model = pair(Routed)
    fully_shard(model)
    train(model, reference)


def models_of_mlx_lm() -> None:
    from tiny_models import build

    for name in ("qwen3", "qwen3_moe", "qwen3_moe"):  # models of mlx-lm with experts share the default activation
        reference, model = pair(partial(build, name))
        fully_shard(model)
        train(model, reference, steps=3, tolerance=1e-4)


def checkpointed() -> None:
    """nn.utils.checkpoint around a unit, and mlx-lm's grad_checkpoint, before and after sharding."""
    from mlx_lm.tuner.trainer import grad_checkpoint

    for when in ("before", "after"):

        class Own(Block):
            pass

        def make(kind: Any = Own) -> Model:
            model = Model()
            shared = model.layers[0].norm
            model.layers = [kind(5) for _ in range(3)]
            model.layers[2].norm = model.layers[0].norm = shared
            return model

        reference, model = pair(make)
        tokens, targets = batch(1)
        _, whole = nn.value_and_grad(reference, loss_of)(reference, tokens, targets)
        mx.eval(whole)
        if when == "before":
            grad_checkpoint(model.layers[0])
        fully_shard(model)
        if when == "after":
            grad_checkpoint(model.layers[0])
        expected, layout = dict(tree_flatten(whole)), cuts(model)

        def counted(model: nn.Module, *parts: mx.array) -> tuple[mx.array, int]:
            return loss_of(model, *parts), 12

        for step in (nn.value_and_grad(model, loss_of), value_and_grad(model, counted)):
            _, gradients = step(model, mine(tokens), mine(targets))
            mx.eval(gradients)
            for path, gradient in tree_flatten(gradients):
                want = layout[path].take(expected[path])
                assert mx.allclose(gradient, want, rtol=1e-5, atol=1e-6).item(), (when, path)

        def penalized(model: nn.Module, *parts: mx.array) -> tuple[mx.array, int]:
            return loss_of(model, *parts) + model.layers[0].up.weight.square().sum(), 12

        def annealed(model: nn.Module, *parts: mx.array) -> tuple[mx.array, int]:
            return loss_of(model, *parts) + mx.array(0.0) * model.layers[0].up.weight.sum(), 12  # zero, as yet

        def repeated(model: nn.Module, *parts: mx.array) -> tuple[mx.array, int]:
            loss, _ = counted(model, *parts)
            return sum((model(parts[0]).mean() for _ in range(15)), loss), 12

        for loss in (penalized, annealed):
            with pytest.raises(mlxdist.InvalidArgument, match="a term of the loss is made of 'layers.0.up.weight'"):
                value_and_grad(model, loss)(model, mine(tokens), mine(targets))
        mx.eval(value_and_grad(model, repeated)(model, mine(tokens), mine(targets)))


def compiled() -> None:
    reference, model = pair()
    fully_shard(model)
    optimizer, plain = optim.AdamW(1e-2, eps=1e-4), optim.AdamW(1e-2, eps=1e-4)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens: mx.array, targets: mx.array) -> mx.array:
        loss, gradients = nn.value_and_grad(model, loss_of)(model, tokens, targets)
        optimizer.update(model, gradients)
        return loss

    optimizer.init(model.trainable_parameters())
    for seed in range(4):
        tokens, targets = batch(seed)
        loss = step(mine(tokens), mine(targets))
        mx.eval(loss, state)
        _, whole = nn.value_and_grad(reference, loss_of)(reference, tokens, targets)
        plain.update(reference, whole)
        mx.eval(reference.parameters(), plain.state)
    require_equal(model, reference, 1e-4)
    tokens, _ = batch(9)
    assert mx.allclose(model(tokens), reference(tokens), rtol=1e-4, atol=1e-4).item()
    train(model, reference, tolerance=1e-4)


def refused() -> None:
    """On one rank alone: an error on all, before any work."""
    wrong = [
        ({"stage": 4}, "stage must be 1, 2 or 3, not 4"),
        ({"prefetch": -1}, "prefetch is a number of units from 0, not -1"),
        ({"reshard_after_forward": 1}, "reshard_after_forward must be True or False"),
        ({"compute_dtype": mx.int8}, "compute_dtype must be a floating point dtype"),
    ]
    for options, message in wrong:
        model = Model()
        with pytest.raises(mlxdist.InvalidArgument, match=message):
            fully_shard(model, **(options if rank == size - 1 else {}))
        assert type(model) is Model and model.embed.weight.shape == (17, 5)
    with pytest.raises(mlxdist.InvalidArgument, match="must be an nn.Module, not a int"):
        fully_shard(3)
    half_frozen = Model()
    if rank == size - 1:
        half_frozen.embed.freeze()
    for module, message in (
        (Model(dims=6 - rank), "6. on rank 0, .* 5"),
        (half_frozen, r"on rank 0, .*, frozen on rank"),
    ):
        if size > 1:
            with pytest.raises(
                mlxdist.Mismatch, match=f"the ranks disagree about the parameter embed.weight.*{message}"
            ):
                fully_shard(module)
    if size > 1:
        first, second = Block(4), Block(4)
        second.norm = first.norm
        fully_shard(first)
        with pytest.raises(mlxdist.InvalidArgument, match="RMSNorm is in another sharded module"):
            fully_shard(second)
    with pytest.raises(mlxdist.InvalidArgument, match="give either group or mesh"):
        fully_shard(Model(), group=group, mesh=mlxdist.mesh(fsdp=size))


def hybrid() -> None:
    """Sharded over fsdp, replicated over dp; the batch of all."""
    for sizes in {2: [{"dp": 2}, {"fsdp": 2}], 4: [{"dp": 2, "fsdp": 2}, {"dp": 4}]}[size]:
        mesh = mlxdist.mesh(**sizes)
        for options in ({}, {"stage": 2}):
            reference, model = pair()
            fully_shard(model, mesh=mesh, **options)
            assert model.reduced_over == (mesh["fsdp"], mesh["dp"])
            held = sum(array.size for _, array in tree_flatten(model.parameters()))
            full = sum(array.size for _, array in tree_flatten(reference.parameters()))
            assert held < full / sizes.get("fsdp", 1) + 10 * size, (held, full)
            train(model, reference)


class Even(nn.Module):
    """Shapes that divide by the numbers of ranks from 1 to 4: nothing is filled up. Embeddings are looked up alone."""

    def __init__(self, dims: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(36, dims)
        self.layers = [
            nn.Sequential(nn.Linear(dims, 2 * dims), nn.GELU(), nn.Linear(2 * dims, dims)) for _ in range(layers)
        ]
        self.norm, self.head = nn.RMSNorm(dims), nn.Linear(dims, 36, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def sent_in(call: Any) -> tuple[int, int]:
    """Collectives of all units, and the payload bytes that this rank sends in them."""
    before = sent()
    mx.eval(call())
    return tuple(after - begin for after, begin in zip(sent(), before))  # type: ignore[return-value]


def sent() -> tuple[int, int]:
    stats = [channel.group.stats() for channel in UnitChannel._of.values()]
    return sum(one["collectives"] for one in stats), sum(one["payload_bytes_sent"] for one in stats)


def bytes_on_the_wire() -> None:
    """Exactly as many as ZeRO says: of each unit one message for each way of its parameters."""
    tokens, targets = batch(1, rows=3)
    tokens, targets = mine(tokens), mine(targets)
    share = (size - 1) / size
    for options, times in [({}, 3), ({"stage": 2}, 2), ({"stage": 1}, 2), ({"reshard_after_forward": False}, 2)]:
        for prefetch in (0, 1, 2):
            model = Even()
            nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
            looked_up = model.embed.weight.nbytes  # has no use for what it has gathered once more
            fully_shard(model, prefetch=prefetch, **options)
            units = 1 + 3 + 2
            expected = (times * units - (times == 3), share * (times * nbytes - (times == 3) * looked_up))
            step = nn.value_and_grad(model, loss_of)
            for _ in range(2):
                found = sent_in(lambda step=step: step(model, tokens, targets))
                assert found == expected, (options, prefetch, found, expected)
            forward = sent_in(lambda model=model: model(tokens))
            assert forward == (units, share * nbytes), (forward, share * nbytes)
            half = Even()
            fully_shard(half, compute_dtype=mx.bfloat16, prefetch=prefetch, **options)
            found = sent_in(lambda half=half: nn.value_and_grad(half, loss_of)(half, tokens, targets))
            assert found == (expected[0], expected[1] / 2), (options, found, expected)


def accumulated() -> None:
    """Micro-batches: equal to one process, and who communicates when."""
    micro, units, share = 3, 6, (size - 1) / size
    for stage, gathers, reduces in [(1, 1, 1), (2, 1, micro), (3, 2 * micro, micro)]:
        model, reference = pair(Even)
        nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        unused = micro * (stage == 3)  # embeddings have no use for what is gathered once more
        looked_up = unused * model.embed.weight.nbytes
        fully_shard(model, stage=stage)
        step = value_and_grad(model, loss_of, micro_batches=micro)
        plain = nn.value_and_grad(reference, loss_of)
        ours, theirs = optim.SGD(0.1), optim.SGD(0.1)
        for seed in range(3):
            tokens, targets = batch(seed, rows=2 * micro, tokens=36)
            before = sent()
            _, gradients = step(model, mine(tokens), mine(targets))
            mx.eval(gradients)
            found = tuple(after - begin for after, begin in zip(sent(), before))
            times = gathers + reduces
            assert found == (times * units - unused, share * (times * nbytes - looked_up)), (stage, found)
            _, whole = plain(reference, tokens, targets)
            ours.update(model, gradients)
            theirs.update(reference, whole)
            mx.eval(model.parameters(), reference.parameters())
        require_equal(model, reference)


def terms_of_shards() -> None:
    """A penalty of the parameters: right without tokens, and an error with them, by which it would count."""

    def loss(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
        squares = sum(array.square().sum() for _, array in tree_flatten(model.trainable_parameters()))
        return loss_of(model, tokens, targets) + 0.01 * squares

    def weighted(model: nn.Module, tokens: mx.array, targets: mx.array) -> tuple[mx.array, int]:
        return loss(model, tokens, targets), targets.size

    (model, reference), (tokens, targets) = pair(), batch(1)
    fully_shard(model.layers[1])
    fully_shard(model)
    _, gradients = value_and_grad(model, loss)(model, mine(tokens), mine(targets))
    _, whole = nn.value_and_grad(reference, loss)(reference, tokens, targets)
    for path, cut in cuts(model).items():
        found = dict(tree_flatten(gradients))[path]
        assert mx.allclose(found, cut.take(dict(tree_flatten(whole))[path]), rtol=1e-4, atol=1e-5).item(), path
    with pytest.raises(mlxdist.InvalidArgument, match=r"a term of the loss is made of '.*' itself"):
        value_and_grad(model, weighted)(model, mine(tokens), mine(targets))


def random_numbers_of_a_first_step() -> None:
    """The first step, which also looks for terms of shards, draws the random numbers that a later one draws."""
    model, _ = pair()
    fully_shard(model)
    seen = []

    def loss(model: nn.Module, tokens: mx.array, targets: mx.array) -> tuple[mx.array, int, mx.array]:
        noise = mx.random.uniform()
        return loss_of(model, tokens, targets) * noise, targets.size, noise

    step = value_and_grad(model, loss, micro_batches=2)
    for seed in (1, 1):
        mx.random.seed(5)
        (_, _, noises), _ = step(model, *(mine(array) for array in batch(seed, rows=2)))
        seen.append([noise.item() for noise in noises])
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1], seen


def left_out() -> None:
    """Stage 1 reduces with the last micro-batch, so it has to call what others have."""
    model, calls = Even(), []

    def loss(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
        calls.append(model)
        model = model if len(calls) % 2 else nn.Sequential(model.embed, model.norm, model.head)
        return loss_of(model, tokens, targets)

    fully_shard(model, stage=1)
    tokens, targets = batch(1)
    step = value_and_grad(model, loss, micro_batches=2)
    with pytest.raises((mlxdist.InvalidArgument, mlxdist.Aborted), match="leaves out a module of fully_shard"):
        step(model, mine(tokens), mine(targets))


def frozen_bytes() -> None:
    """Of what is frozen no gradient is sent; with gradient checkpointing nothing is gathered a third time."""
    tokens, targets = batch(1, rows=3)
    model = Even()
    model.freeze()
    model.layers[1].unfreeze()
    nbytes = {True: 0, False: 0}
    trained = dict(tree_flatten(model.trainable_parameters()))
    for path, array in tree_flatten(model.parameters()):
        nbytes[path in trained] += array.nbytes
    ahead = sum(a.nbytes for _, a in tree_flatten([model.embed.parameters(), model.layers[0].parameters()]))
    fully_shard(model)
    _, found = sent_in(lambda: nn.value_and_grad(model, loss_of)(model, mine(tokens), mine(targets)))
    # Before what is trained nothing has a gradient, so nothing is gathered again.
    assert found == (size - 1) / size * (3 * nbytes[True] + 2 * nbytes[False] - ahead), (found, nbytes, ahead)


class Checkpointed(Even):
    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nn.utils.checkpoint(layer)(x)
        return self.head(self.norm(x))


def checkpointed_bytes() -> None:
    """What computes once more gathers for it, and the gradients take that, from the second step on."""
    (model, _), (reference, _) = pair(Checkpointed), pair(Even)
    nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    looked_up = model.embed.weight.nbytes
    fully_shard(model)
    tokens, targets = batch(1, rows=3)
    step = nn.value_and_grad(model, loss_of)
    mx.eval(step(model, mine(tokens), mine(targets)))
    found = sent_in(lambda: step(model, mine(tokens), mine(targets)))
    assert found == (3 * 6 - 1, (size - 1) / size * (3 * nbytes - looked_up)), (found, nbytes, looked_up)
    train(model, reference, rows=3, tokens=36)


class Wide(nn.Module):
    """Blocks whose parameters are all that takes memory."""

    def __init__(self, dims: int = 192, layers: int = 12) -> None:
        super().__init__()
        self.layers = [
            nn.Sequential(nn.Linear(dims, 4 * dims), nn.GELU(), nn.Linear(4 * dims, dims)) for _ in range(layers)
        ]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = x + layer(x)
        return x


def calls_of_a_layer() -> None:
    """A step calls at most 600 functions of Python for each layer of Qwen3, and 520 of MLX and of Python's C half.

    It is 534 and 469. About 135 and more are those of nn.value_and_grad and of the layer itself.
    """
    from mlxdist.tools.bench.models import make_model

    tokens, targets = batch(1, tokens=64)
    counts = []
    for layers in (2, 4):
        model = make_model("qwen", 64, mx.float32, layers, 64)
        fully_shard(model)
        step, calls = nn.value_and_grad(model, loss_of), Counter[str]()

        def count(frame: FrameType, event: str, argument: object, calls: Counter[str] = calls) -> None:
            calls[event] += 1

        mx.eval(step(model, mine(tokens), mine(targets)))
        sys.setprofile(count)
        try:
            results = step(model, mine(tokens), mine(targets))
        finally:
            sys.setprofile(None)
        mx.eval(results)
        counts.append(calls)
    python, native = ((counts[1][event] - counts[0][event]) / 2 for event in ("call", "c_call"))
    assert 0 < python <= 600 and 0 < native <= 520, (python, native)


def memory(number_of_layers: str) -> None:
    """(parameters + gradients + optimizer) / ranks, and two units: what MLX may use is limited to it.

    Without a limit MLX allocates ahead of what it computes, as much as it has."""
    layers = int(number_of_layers)
    shapes = [array for _, array in tree_flatten(Wide(layers=layers).parameters())]
    nbytes = sum(array.nbytes for array in shapes)
    unit = nbytes // layers
    bound = 4 * nbytes / size + 2 * unit
    x = mx.ones((1, 192))
    mx.eval(x)
    model = Wide(layers=layers)
    fully_shard(model)  # of lazy parameters one unit at a time is made
    made = mx.get_peak_memory()
    optimizer = optim.AdamW(1e-3)
    step = nn.value_and_grad(model, lambda model, x: model(x).square().sum())
    mx.set_memory_limit(int(bound))
    peaks = []
    for _ in range(4):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        loss, gradients = step(model, x)
        mx.eval(loss, gradients)
        peaks.append(mx.get_peak_memory())
        mx.reset_peak_memory()
        optimizer.update(model, gradients)
        del gradients
        mx.eval(model.parameters(), optimizer.state)
        peaks.append(mx.get_peak_memory())
    assert max(peaks) < 1.1 * bound, (peaks, bound)
    assert made < nbytes / size + 4 * unit


run_scenario(globals())
