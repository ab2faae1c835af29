"""One rank of test_value_and_grad.py: `check` is the name of a function below."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist import train
from mlxdist.nn.models.cuts import cuts
from mlxdist.runtime.group.group import engine_of

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import wait_for

VOCABULARY = 19


class Model(nn.Module):
    """Odd sizes, tied weights, a parameter that the loss does not depend on, and what is frozen."""

    def __init__(self, layers: int = 3, dims: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dims)
        self.layers = [nn.Linear(dims, dims) for _ in range(layers)]
        self.norm = nn.RMSNorm(dims)
        self.unused = mx.ones((3,))
        self.frozen = nn.Linear(dims, dims)
        self.frozen.freeze()

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + nn.gelu(layer(x))
        return self.embedding.as_linear(self.norm(self.frozen(x)))


def model_of(seed: int = 0, dtype: mx.Dtype = mx.float32, **sizes: int) -> Model:
    mx.random.seed(seed)
    model = Model(**sizes)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def sequences(rows: int, seed: int = 1) -> tuple[mx.array, mx.array]:
    """Tokens, and how many of each row count."""
    random = np.random.default_rng(seed)
    return mx.array(random.integers(0, VOCABULARY, (rows, 6))), mx.array(random.integers(1, 6, rows))


def mean_loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def token_loss(model: nn.Module, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    """As mlx-lm's default_loss."""
    counts = mx.arange(1, tokens.shape[1]) <= lengths[:, None]
    loss = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) * counts
    return loss.astype(mx.float32).sum() / counts.sum(), counts.sum()


def share(rows: int) -> slice:
    """This rank's of equal shares."""
    return slice(rank * rows // size, (rank + 1) * rows // size)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    found, wanted = dict(tree_flatten(got)), dict(tree_flatten(expected))
    assert list(found) == list(wanted)
    for path, array in wanted.items():
        assert found[path].dtype == array.dtype and found[path].shape == array.shape, path
        a, b = (np.array(x.astype(mx.float32)) for x in (found[path], array))
        np.testing.assert_allclose(a, b, rtol=tolerance * 10, atol=tolerance, err_msg=path)


def assert_same_on_all_ranks(tree: Any) -> None:
    for path, array in tree_flatten(tree):
        rows = mlxdist.all_gather(array.reshape(1, -1).astype(mx.float32), group=group)
        assert np.array_equal(np.array(rows[0]), np.array(rows[rank]), equal_nan=True), path


def whole_batch() -> None:
    """Equal shares, micro-batches, every size of bucket: the gradients of one process; the same in every step."""
    model, (tokens, _) = model_of(), sequences(12)
    loss, expected = nn.value_and_grad(model, lambda tokens: mean_loss(model, tokens))(tokens)
    before = model.parameters()
    for micro_batches in (1, 12 // size) if size > 1 else (1, 3):
        results = []
        for all_reduce_size in (0, 64, 300, 2**25):
            step = train.value_and_grad(
                model,
                lambda tokens: mean_loss(model, tokens),
                micro_batches=micro_batches,
                all_reduce_size=all_reduce_size,
            )
            for _ in range(2):
                own, gradients = step(tokens[share(12)])
                assert_close(gradients, expected)
                results.append((own, gradients))
        first = results[0]
        assert_same_on_all_ranks(first[1])
        for other in results[1:]:
            assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(tree_flatten(first), tree_flatten(other)))
        assert abs(mlxdist.all_sum(first[0]).item() / size - loss.item()) < 1e-6
    after = model.parameters()
    for (path, a), (_, b) in zip(tree_flatten(before), tree_flatten(after)):
        assert mx.array_equal(a, b), path


def unequal_shares() -> None:
    """Ranks of other numbers of rows and tokens, one of them with none: the mean over all tokens."""
    model = model_of()
    tokens, lengths = sequences(24)
    ends = np.cumsum([0, 2, 6, 4, 12][: size + 1])
    own = slice(int(ends[rank]), int(ends[rank + 1]))
    for case in ("all", "none on rank 0"):
        lengths = mx.where(mx.arange(24) < ends[1], 0, lengths) if case != "all" and size > 1 else lengths
        (loss, count), expected = nn.value_and_grad(model, lambda *batch: token_loss(model, *batch))(
            tokens[: ends[size]], lengths[: ends[size]]
        )
        for micro_batches in (1, 2):
            step = train.value_and_grad(model, lambda *batch: token_loss(model, *batch), micro_batches=micro_batches)
            for _ in range(2):
                (own_loss, own_count), gradients = step(tokens[own], lengths[own])
                assert_close(gradients, expected)
                assert_same_on_all_ranks(gradients)
            assert mlxdist.all_sum(own_count).item() == count.item()
            total = mx.where(own_count > 0, own_loss * own_count, 0)
            assert abs(mlxdist.all_sum(total).item() / count.item() - loss.item()) < 1e-5


def dtypes() -> None:
    """Gradients of 16 bits travel in float32 by default, which says how far they are from those of one process."""
    tokens, lengths = sequences(12)
    for dtype, tolerance in ((mx.float16, 2e-3), (mx.bfloat16, 2e-2)):
        model = model_of(dtype=dtype)
        _, expected = nn.value_and_grad(model, lambda *batch: token_loss(model, *batch))(tokens, lengths)
        for reduce_dtype, micro_batches in ((None, 1), (None, 2), (mx.float16, 1), (dtype, 2)):
            step = train.value_and_grad(
                model,
                lambda *batch: token_loss(model, *batch),
                reduce_dtype=reduce_dtype,
                micro_batches=micro_batches if 12 // size % micro_batches == 0 else 1,
            )
            _, gradients = step(tokens[share(12)], lengths[share(12)])
            assert_close(gradients, expected, tolerance)
            assert_same_on_all_ranks(gradients)


def numpy_batches() -> None:
    """Gradients of float16 from a batch of NumPy are those of the same one of MLX, also where the sum over its tokens
    is none of float16."""
    x = mx.ones((2, 2048))
    model = nn.Linear(1, 1, bias=False)
    model.weight = mx.ones((1, 1), mx.float16)

    def loss(x: Any) -> tuple[mx.array, int]:
        return 40 * model.weight.sum() * mx.array(x).astype(mx.float16).mean(), x.size

    for batch in (x, np.array(x), {"tokens": [np.array(x)]}):
        of_batch = lambda batch: loss(batch["tokens"][0] if isinstance(batch, dict) else batch)
        _, gradients = train.value_and_grad(model, of_batch)(batch)
        assert gradients["weight"].item() == 40, (type(batch), gradients)


def counters() -> dict[str, int]:
    return engine_of(group).world.counters()


def messages() -> None:
    """Collectives: on the last micro-batch only, of trainable parameters only."""
    model, (tokens, lengths) = model_of(), sequences(12)
    model.layers[1].freeze()
    sent = len(tree_flatten(model.trainable_parameters()))
    for micro_batches in (1, 12 // size):
        for all_reduce_size, buckets in ((0, sent), (2**25, 1)):
            step = train.value_and_grad(
                model,
                lambda tokens: mean_loss(model, tokens),
                micro_batches=micro_batches,
                all_reduce_size=all_reduce_size,
            )
            mx.eval(step(tokens[share(12)]))
            before = counters()["collectives"]
            mx.eval(step(tokens[share(12)]))
            assert counters()["collectives"] - before == buckets, (micro_batches, all_reduce_size)
    step = train.value_and_grad(model, lambda *batch: token_loss(model, *batch), micro_batches=12 // size)
    mx.eval(step(tokens[share(12)], lengths[share(12)]))
    before = counters()["collectives"]
    mx.eval(step(tokens[share(12)], lengths[share(12)]))
    assert counters()["collectives"] == before + 2, "one for the tokens, one bucket"
    for _ in range(2):  # the plan follows what is trained
        model.unfreeze()
        assert step(tokens[share(12)], lengths[share(12)])[1]["layers"][1]
        model.layers[1].freeze()
        assert not step(tokens[share(12)], lengths[share(12)])[1]["layers"][1]


def nbytes() -> None:
    """2 (n - 1) / n of the trainable parameters, whatever the number of micro-batches; in float32 twice as many."""
    x = mx.ones((12 // size, 256 * size))
    for dtype, reduce_dtype, wire in ((mx.float32, None, 4), (mx.bfloat16, None, 4), (mx.bfloat16, mx.bfloat16, 2)):
        model = nn.Sequential(*(nn.Linear(256 * size, 256 * size, bias=False) for _ in range(4)))
        model.set_dtype(dtype)
        model.layers[1].freeze()
        for micro_batches in (1, 12 // size):
            step = train.value_and_grad(
                model,
                lambda x: model(x).astype(mx.float32).mean(),
                micro_batches=micro_batches,
                all_reduce_size=2**20,
                reduce_dtype=reduce_dtype,
            )
            mx.eval(step(x.astype(dtype)))
            before = counters()["payload_bytes_sent"]
            mx.eval(step(x.astype(dtype)))
            expected = 2 * (size - 1) * 3 * (256 * size) ** 2 * wire // size
            assert counters()["payload_bytes_sent"] - before == expected, (dtype, reduce_dtype, micro_batches)


def overlap() -> None:
    """The first bucket is complete before the backward pass is: on rank 0, while the others cannot complete theirs.

    They wait, in the gradient of the first layer, for rank 0, which answers when it has seen the first bucket.
    """
    gate, stream = group.split(0), mx.new_stream(mx.cpu)
    is_waiting = False

    @mx.custom_function
    def wait(x: mx.array) -> mx.array:
        return x + 0

    @wait.vjp
    def backward(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        if not is_waiting or rank == 0:
            return cotangent
        return cotangent + mlxdist.all_sum(mx.zeros((1,)), group=gate, stream=stream)

    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), mx.ones((4, 8))
    model = nn.Sequential(first, wait, second)
    step = train.value_and_grad(model, lambda x: mx.square(model(x)).mean(), all_reduce_size=0)
    mx.eval(step(x))
    is_waiting, before = True, counters()["collectives"]
    gradients = step(x)
    if rank == 0:
        has_left = wait_for(lambda: counters()["collectives"] > before)
        assert has_left, "no bucket has left before the backward pass ended"
        mlxdist.all_sum(np.zeros((1,), np.float32), group=gate)
    mx.eval(gradients)
    assert counters()["collectives"] == before + 5, "four gradients and the answer"


def adapters() -> None:
    """LoRA of mlx-lm and its own loss and trainer's calls: only adapters are sent, and all ranks stay the same."""
    mx.random.seed(3)
    arguments = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_attention_heads=2,
        rms_norm_eps=1e-5, vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=64, head_dim=8,
        rope_theta=1e4, tie_word_embeddings=True,
    )  # fmt: skip
    model = qwen3.Model(arguments)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    mx.eval(model.parameters())
    tokens, ends = sequences(12)
    lengths = mx.stack([mx.zeros_like(ends), ends], axis=1)
    alone = tree_map(lambda array: mx.array(array), model.trainable_parameters())

    def trained(step: Any, *batch: mx.array) -> Any:
        model.update(alone)
        optimizer = optim.Adam(1e-2)
        for _ in range(5):
            _, gradients = step(model, *batch)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)
        return model.trainable_parameters()

    expected = trained(nn.value_and_grad(model, default_loss), tokens, lengths)
    step = train.value_and_grad(model, default_loss)
    got = trained(step, tokens[share(12)], lengths[share(12)])
    assert_close(got, expected, 1e-4)
    assert_same_on_all_ranks(got)
    assert all("lora" in path for path, _ in tree_flatten(got))


def sharded() -> None:
    """What fully_shard has averaged is not averaged twice: over one group, and inside a mesh with replicas."""
    meshes = [{"fsdp": size}, *([{"dp": 2, "fsdp": 2}] if size == 4 else [])]
    for sizes in meshes:
        mesh = mlxdist.mesh(**sizes)
        tokens, lengths = sequences(12)
        reference = model_of()
        for micro_batches in (1, 3):
            if 12 // size % micro_batches:
                continue
            model = train.fully_shard(model_of(), mesh=mesh)
            _, expected = nn.value_and_grad(reference, lambda *batch: token_loss(reference, *batch))(tokens, lengths)
            step = train.value_and_grad(
                model, lambda *batch: token_loss(model, *batch), mesh=mesh, micro_batches=micro_batches
            )
            where = cuts(model)
            for _ in range(2):
                found = dict(tree_flatten(step(tokens[share(12)], lengths[share(12)])[1]))
                assert list(found) == [path for path, _ in tree_flatten(expected)]
                for path, array in tree_flatten(expected):
                    want = np.array(where[path].take(array))
                    np.testing.assert_allclose(np.array(found[path]), want, rtol=1e-5, atol=1e-6, err_msg=path)
    if size > 1:
        model = train.fully_shard(model_of(), group=group.split(0))
        step = train.value_and_grad(model, lambda tokens: mean_loss(model, tokens))
        with pytest.raises(mlxdist.InvalidArgument, match="averaged over another group by fully_shard"):
            step(sequences(12)[0])


def refused() -> None:
    """One sentence, on all ranks, of what is wrong on one; then the next step is possible."""
    model, (tokens, _) = model_of(), sequences(12)
    mesh = mlxdist.mesh(dp=size)
    last = rank == size - 1

    def fails(text: str) -> Any:
        kind = mlxdist.Mismatch if "disagree" in text else mlxdist.InvalidArgument
        return pytest.raises(kind, match=text)

    for options, text in (
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"all_reduce_size": -1}, "all_reduce_size is -1"),
        ({"reduce_dtype": mx.int32}, "reduce_dtype is int32"),
        ({"group": group, "mesh": mesh}, "either group or mesh"),
    ):
        with fails(text):
            train.value_and_grad(model, mean_loss, **(options if last else {}))
    with fails("model must be an nn.Module"):
        train.value_and_grad(model if not last else 3, mean_loss)
    for value, text in (
        ((1,), "tuple of one"),
        ((1, "x"), "returned 'x'"),
        ((1, -1), "-1"),
        ((1, float("nan")), "nan"),
    ):
        step = train.value_and_grad(model, lambda tokens: (mean_loss(model, tokens), *value[1:]))
        with fails(text):
            step(tokens)
    step = train.value_and_grad(model, lambda tokens: mean_loss(model, tokens), micro_batches=5)
    with fails("12 rows, which do not divide into micro_batches=5 equal parts; give 10 or 15"):
        step(tokens if last else tokens[:10])
    with fails("which mx.compile"):
        mx.compile(lambda tokens: step(tokens))(tokens[:10])
    _, gradients = step(tokens[:10])
    assert_same_on_all_ranks(gradients)

    def broken(tokens: mx.array) -> mx.array:
        if last:
            raise ValueError("the loss of the last rank is broken")
        return mean_loss(model, tokens)

    with pytest.raises(ValueError if last else mlxdist.InvalidArgument, match="the loss of the last rank is broken"):
        train.value_and_grad(model, broken)(tokens)
    if size == 1:
        return
    other = model_of(layers=2 if last else 3)
    step = train.value_and_grad(other, lambda tokens: mean_loss(other, tokens))
    with fails("the ranks disagree about the parameter layers.2.*: float32 .* on rank 0, nothing on rank"):
        step(tokens)
    other = model_of(dtype=mx.bfloat16 if last else mx.float32)
    step = train.value_and_grad(other, lambda tokens: mean_loss(other, tokens))
    with fails("disagree about the parameter embedding.weight: float32 .* on rank 0, bfloat16"):
        step(tokens)
    with fails("the ranks disagree about the micro_batches: 1 on rank 0, 2 on rank"):
        train.value_and_grad(model, mean_loss, micro_batches=1 + last)
    if last:
        model.layers[1].freeze()
    with fails("disagree about the parameter layers.1.*: float32 .* on rank 0, float32 .*, frozen on rank"):
        train.value_and_grad(model, lambda tokens: mean_loss(model, tokens))(tokens[:10])
    model.unfreeze()
    step = train.value_and_grad(
        model, lambda tokens: (mean_loss(model, tokens), 3) if last else mean_loss(model, tokens)
    )
    with fails("the ranks disagree"):
        step(tokens)


run_scenario(globals())
