"""One rank of test_vocab_parallel.py. Arguments: scenarios."""

from itertools import product

import mlx.core as mx
import numpy as np
from comparing import close, equal, refused
from mlx import nn
from scenarios import group, rank, run_scenarios, size

from mlxdist.nn.layout.partition import take
from mlxdist.nn.tensor_parallel.sampling import vocab_parallel_argmax, vocab_parallel_cross_entropy
from mlxdist.nn.tensor_parallel.vocab_parallel import (
    ParallelLMHead,
    QuantizedParallelLMHead,
    QuantizedVocabParallelEmbedding,
    VocabParallelEmbedding,
)

CUTS = [None, [r + 1 for r in range(size)]]  # weights: as even as can be, and uneven
QUANTIZED = [(32, bits, "affine") for bits in (2, 3, 4, 5, 6, 8)]
QUANTIZED += [(32, 4, "mxfp4"), (16, 4, "nvfp4"), (32, 8, "mxfp8")]


def tokens_of(vocabulary: int) -> list[mx.array]:
    shapes = [(), (7,), (2, 5), (0,), (3, 0)]
    tokens = [mx.random.randint(0, vocabulary, shape) for shape in shapes]
    kinds = [tokens[1].astype(mx.int64), (tokens[1] % 256).astype(mx.uint8)]
    return [*tokens, mx.arange(vocabulary).astype(mx.uint32), *kinds]


def embedding() -> None:
    """Bitwise the rows of nn.Embedding, and its gradient."""
    for weights, vocabulary, dtype in product(CUTS, [size, 3 * size, 301], [mx.float32, mx.float16, mx.bfloat16]):
        if weights is not None and vocabulary == size:
            continue
        mx.random.seed(1)
        dense = nn.Embedding(vocabulary, 6)
        mx.random.seed(1)
        layer = VocabParallelEmbedding(vocabulary, 6, rank_shares=weights)
        assert sum(layer.sizes) == vocabulary
        equal(layer.weight, take(dense.weight, 0, layer.sizes, rank), "initial values")
        dense.set_dtype(dtype)
        layer = VocabParallelEmbedding.from_embedding(dense, rank_shares=weights)
        for tokens in tokens_of(vocabulary):
            equal(layer(tokens), dense(tokens), f"embedding of {tokens.shape} {tokens.dtype}, {vocabulary} {weights}")
        outside = layer(mx.array([-1, vocabulary, 2**40 + 1, 0]))
        equal(outside[:3], mx.zeros((3, 6), dtype), "tokens from outside")
        equal(outside[3], dense.weight[0], "a token beside tokens from outside")
        equal(layer.to_embedding().weight, dense.weight, "back again")
    tokens = mx.array([0, 5, 5, 300, 150, 0])
    scale = mx.random.normal((6, 6))

    def loss(layer: nn.Module) -> mx.array:
        return (mx.sin(layer(tokens)) * scale).sum()

    dense.set_dtype(mx.float32)
    layer = VocabParallelEmbedding.from_embedding(dense)
    value, expected = nn.value_and_grad(dense, loss)(dense)
    found, gradient = nn.value_and_grad(layer, loss)(layer)
    close(found, value, "loss")
    close(gradient["weight"], take(expected["weight"], 0, layer.sizes, rank), "gradient")
    frozen = nn.Embedding(9, 4)
    frozen.freeze()
    assert not VocabParallelEmbedding.from_embedding(frozen).trainable_parameters()


def tied() -> None:
    """Embedding and head in one: all of the gradient."""
    mx.random.seed(2)
    for gather, weights in product([False, True], CUTS):
        dense = nn.Embedding(41, 8)
        layer = VocabParallelEmbedding.from_embedding(dense, gather_output=gather, rank_shares=weights)
        tokens, targets = mx.random.randint(0, 41, (2, 3)), mx.random.randint(0, 41, (2, 3))
        h = mx.random.normal((2, 3, 8))

        def whole(layer: nn.Module, h: mx.array) -> mx.array:
            logits = layer.as_linear(mx.tanh(layer(tokens) + h))
            return nn.losses.cross_entropy(logits, targets, reduction="mean")

        def parts(layer: nn.Module, h: mx.array) -> mx.array:
            logits = layer.as_linear(mx.tanh(layer(tokens) + h))
            return vocab_parallel_cross_entropy(logits, targets, layer.sizes, reduction="mean")

        def gradients(layer: nn.Module, loss: object, h: mx.array) -> tuple:
            def of(parameters: dict, h: mx.array) -> mx.array:
                layer.update(parameters)
                return loss(layer, h)

            return mx.value_and_grad(of, (0, 1))(layer.trainable_parameters(), h)

        value, (by_weight, by_h) = gradients(dense, whole, h)
        found, (gradient, gradient_h) = gradients(layer, whole if gather else parts, h)
        close(found, value, "loss of a tied head")
        close(gradient["weight"], take(by_weight["weight"], 0, layer.sizes, rank), "gradient of a tied weight")
        close(gradient_h, by_h, "gradient of the input of a tied head")


def quantized() -> None:
    mx.random.seed(3)
    for number, (group_size, bits, mode) in enumerate(QUANTIZED):
        weights = CUTS[number % 2]
        plain = nn.Embedding(37, 64)
        dense = plain.to_quantized(group_size, bits, mode)
        layer = VocabParallelEmbedding.from_embedding(dense, rank_shares=weights)
        assert isinstance(layer, QuantizedVocabParallelEmbedding) and not layer.trainable_parameters()
        again = VocabParallelEmbedding.from_embedding(plain, rank_shares=weights).to_quantized(group_size, bits, mode)
        what = f"quantized {group_size} {bits} {mode}"
        values = mx.dequantize(
            dense.weight, dense.scales, dense.get("biases"), group_size=group_size, bits=bits, mode=mode
        )
        x = mx.random.normal((3, 64))
        expected = take(dense.as_linear(x), -1, layer.sizes, rank)
        for one in (layer, again):
            for tokens in tokens_of(37):
                equal(one(tokens), values[tokens], what)
            close(one.as_linear(x), expected, f"{what} as a head")
        back = layer.to_embedding()
        assert (back.num_embeddings, back.dims, back.bits, back.mode) == (37, 64, bits, mode)
        for name, value in dense.parameters().items():
            equal(back[name], value, f"{what}, {name} back again")
        head = nn.Linear(64, 37, bias=number % 2 == 0).to_quantized(group_size, bits, mode)
        part = ParallelLMHead.from_linear(head, rank_shares=weights)
        assert isinstance(part, QuantizedParallelLMHead) and part.sizes == layer.sizes
        close(part(x), take(head(x), -1, part.sizes, rank), f"{what} head")
        back = part.to_linear()
        for name, value in head.parameters().items():
            equal(back[name], value, f"{what} head, {name} back again")
    model = nn.Sequential(VocabParallelEmbedding.from_embedding(plain), nn.Linear(64, 32))
    nn.quantize(model, 32, 4)
    assert isinstance(model.layers[0], QuantizedVocabParallelEmbedding)


def head() -> None:
    mx.random.seed(4)
    for bias, gather, weights, vocabulary in product([True, False], [False, True], CUTS, [2 * size, 29]):
        dense = nn.Linear(8, vocabulary, bias)
        layer = ParallelLMHead.from_linear(dense, gather_output=gather, rank_shares=weights)
        assert type(layer) is ParallelLMHead and "bias" in layer or not bias
        x, targets = mx.random.normal((2, 3, 8)), mx.random.randint(0, vocabulary, (2, 3))
        logits = dense(x)
        close(layer(x), logits if gather else take(logits, -1, layer.sizes, rank), "logits")
        if not gather:
            equal(vocab_parallel_argmax(layer(x), layer.sizes), mx.argmax(logits, axis=-1), "the likeliest token")

        def whole(layer: nn.Module, x: mx.array) -> mx.array:
            return nn.losses.cross_entropy(layer(x), targets, reduction="sum")

        def parts(layer: nn.Module, x: mx.array) -> mx.array:
            return vocab_parallel_cross_entropy(layer(x), targets, layer.sizes, reduction="sum")

        loss = whole if gather else parts
        value, expected = nn.value_and_grad(dense, whole)(dense, x)
        found, gradient = nn.value_and_grad(layer, loss)(layer, x)
        close(found, value, "loss")
        for name in expected:
            close(gradient[name], take(expected[name], 0, layer.sizes, rank), f"gradient of the head's {name}")
        by_x = mx.grad(lambda x, whole=whole, dense=dense: whole(dense, x))(x)
        close(mx.grad(lambda x, loss=loss, layer=layer: loss(layer, x))(x), by_x, "gradient of the head's input")
        equal(layer.to_linear().weight, dense.weight, "back again")


def bad_input() -> None:
    mx.random.seed(9)
    odd = size - 1  # the only rank whose argument is wrong
    dense = nn.Embedding(4 * size, 8)
    refused("num_embeddings", lambda: VocabParallelEmbedding(size - 1 if size > 1 else 0, 8))
    refused("dims must be a positive integer", lambda: VocabParallelEmbedding(4 * size, 0 if rank == odd else 8))
    refused("rank_shares must be positive", lambda: VocabParallelEmbedding(4 * size, 8, rank_shares=[-1] * size))
    wrong = nn.Linear(8, 4) if rank == odd else dense
    refused("must be an nn.Embedding", lambda: VocabParallelEmbedding.from_embedding(wrong))
    if size > 1:
        other = nn.Embedding(4 * size, 4) if rank == odd else dense
        refused("disagree about the parameter weight", lambda: VocabParallelEmbedding.from_embedding(other))
        refused("is too little for", lambda: ParallelLMHead(8, size - 1))
    layer = VocabParallelEmbedding.from_embedding(dense)
    before = group.stats()["collectives"]
    refused("tokens must be integers", lambda: layer(mx.zeros((3,))))
    refused("whose last dimension must be 8", lambda: layer.as_linear(mx.zeros((3, 7))))
    assert group.stats()["collectives"] == before
    assert np.isfinite(np.array(layer(mx.array([0])))).all()  # the ranks are still in step


run_scenarios(globals())
