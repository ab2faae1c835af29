"""One rank of test_parallel_sampling.py. Arguments: scenarios.

Every rank makes all logits from the same seed, gives its own shard to mlxdist, and computes by itself what comes out.
"""

from itertools import product

import mlx.core as mx
import numpy as np
from comparing import close, refused
from mlx import nn
from scenarios import group, rank, run_scenarios, size

import mlxdist
from mlxdist.nn.layout.partition import split_sizes, take
from mlxdist.nn.tensor_parallel.sampling import (
    NOISE_BLOCK,
    VocabParallelSampler,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_probs,
)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def sizes_of(vocabulary: int, uneven: bool = True) -> list[int]:
    return split_sizes("test", vocabulary, size, [r + 1 for r in range(size)] if uneven else [1] * size)


def mine(x: mx.array, sizes: list[int]) -> mx.array:
    return take(x, -1, sizes, rank)


def with_ties(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Logits from -5 to 5 of which many are equal, also over the boundaries of the shards."""
    return (mx.round(mx.random.normal(shape) * 4) / 4).astype(dtype)


def equal(a: mx.array, b: object, what: str) -> None:
    assert np.array_equal(np.array(a), np.array(b)), f"{what}: {a}, expected {b}"


def argmax() -> None:
    mx.random.seed(1)
    for dtype, shape, vocabulary in product(DTYPES, [(), (1,), (2, 3), (0,)], [size, 37, 400]):
        logits = with_ties(*shape, vocabulary, dtype=dtype)
        sizes = sizes_of(vocabulary, uneven=vocabulary == 400)
        # MLX's argmax takes no array without elements.
        expected = mx.argmax(logits, axis=-1) if logits.size else mx.zeros(shape, mx.uint32)
        selected = vocab_parallel_argmax(mine(logits, sizes), sizes)
        assert selected.dtype == mx.uint32
        equal(selected, expected, f"argmax of {dtype} {shape} {vocabulary}")
    low = mx.full((2, 3 * size), -mx.inf)
    equal(vocab_parallel_argmax(mine(low, [3] * size), [3] * size), [0, 0], "nothing but -inf")


def noise_of(rows: int, vocabulary: int, key: mx.array) -> np.ndarray:
    """One key for each block of each row, in order."""
    blocks = -(-vocabulary // NOISE_BLOCK)
    keys = mx.random.split(key, rows * blocks)
    noise = [mx.random.gumbel((NOISE_BLOCK,), key=key) for key in keys]
    return np.array(mx.concatenate(noise).reshape(rows, -1)[:, :vocabulary])


def dense_choice(x: np.ndarray, noise: np.ndarray, chain: tuple) -> int:
    """mlx-lm's sampler for one row, with sorting in float64."""
    temp, top_p, min_p, min_tokens_to_keep, top_k = chain
    if temp == 0:
        return int(np.argmax(x))
    if 0 < top_p < 1:
        descending = np.argsort(-x, kind="stable")
        probabilities = np.exp(x[descending].astype(np.float64) - x.max())
        before = np.cumsum(probabilities) - probabilities
        kept = (before < top_p * probabilities.sum()).sum()
        x = np.where(x >= x[descending[kept - 1]], x, -np.inf)
    if min_p > 0:
        keep = x >= x.max() + np.float32(np.log(min_p))
        keep[np.argsort(-x, kind="stable")[:min_tokens_to_keep]] = True
        x = np.where(keep, x, -np.inf)
    if top_k > 0:
        keep = np.zeros(len(x), bool)
        keep[np.argsort(-x, kind="stable")[:top_k]] = True
        x = np.where(keep, x, -np.inf)
    return int(np.argmax(x.astype(np.float32) * np.float32(1 / temp) + noise))


CHAINS = [
    # temp, top_p, min_p, min_tokens_to_keep, top_k
    (0.0, 0.5, 0.1, 1, 3),
    (0.7, 0.0, 0.0, 1, 0),
    (1.3, 0.6, 0.0, 1, 0),
    (1.0, 0.05, 0.0, 1, 0),
    (1.0, 0.999, 0.0, 1, 0),
    (2.0, 0.0, 0.2, 1, 0),
    (2.0, 0.0, 0.9, 9, 0),
    (3.0, 0.0, 0.0, 1, 1),
    (3.0, 0.0, 0.0, 1, 4),
    (3.0, 0.0, 0.0, 1, "all"),
    (2.0, 0.8, 0.05, 2, 6),
    (2.0, 0.3, 0.9, 20, 30),
]


def samplers(step: int = 5) -> None:
    """Token for token what the dense formula gives with the same noise, whatever the number of ranks.

    Every chain at least once; with step 1 each for every dtype and vocabulary.
    """
    mx.random.seed(2)
    cases = list(enumerate(product([41, 2500], DTYPES, CHAINS)))
    for number, (vocabulary, dtype, (temp, top_p, min_p, keep, top_k)) in cases[::step]:
        chain = (temp, top_p, min_p, keep, vocabulary if top_k == "all" else top_k)
        rows, key, sizes = 12, mx.random.key(number), sizes_of(vocabulary)
        logits = with_ties(rows, vocabulary, dtype=dtype)
        logits[rows // 2 :] = mx.random.normal((rows - rows // 2, vocabulary))  # without ties, most of them
        logits[1, 3:] = -mx.inf
        logits[2, : vocabulary // 2] = mx.where(logits[2, : vocabulary // 2] == 0, -0.0, -0.25)
        sampler = VocabParallelSampler(*chain, sizes=sizes)
        x, noise = np.array(logits.astype(mx.float32)), noise_of(rows, vocabulary, key)
        expected = [dense_choice(x[row], noise[row], chain) for row in range(rows)]
        local = mine(logits, sizes)
        equal(sampler(local, key), expected, f"{chain} of {dtype}, {vocabulary} tokens")
        shaped = local.reshape(3, 4, -1)
        if number == 10:  # a chain with all filters; MLX compiles each for seconds
            shaped = mx.compile(sampler)(shaped, key)
        else:
            shaped = sampler(shaped, key)
        equal(shaped.reshape(-1), expected, f"{chain} of {dtype}, other shape")
    assert sampler(mx.zeros((0, sizes[rank]))).shape == (0,)


def all_samplers() -> None:
    samplers(step=1)


def distribution() -> None:
    """Chi-square test with fixed seeds: below the 99.9 % quantile, and far above it for a wrong distribution."""
    mx.random.seed(3)
    draws, vocabulary = 4000, 12
    logits = mx.random.normal((vocabulary,)) * 1.5
    sizes = sizes_of(vocabulary)
    rows = mx.broadcast_to(mine(logits, sizes), (draws, sizes[rank]))
    quantile = 31.3  # of chi-square with 11 degrees of freedom
    for temp, seed_of in ((1.0, lambda r: 5), (0.6, lambda r: 5), (1.5, lambda r: 100 + r)):
        mx.random.seed(seed_of(rank))
        tokens = np.array(VocabParallelSampler(temp, sizes=sizes)(rows))
        everyone = mlxdist.all_gather(tokens[None].astype(np.uint32))
        assert (everyone == everyone[0]).all(), "ranks chose different tokens"
        counts = np.bincount(tokens, minlength=vocabulary)
        expected = draws * np.array(mx.softmax(logits / temp))
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < quantile, f"temp {temp}: {counts}, expected {expected}: {chi_square}"
        wrong = draws * np.array(mx.softmax(logits / (temp * 1.2)))
        assert ((counts - wrong) ** 2 / wrong).sum() > quantile, "the test cannot tell distributions apart"
    sampler = VocabParallelSampler(1.0, top_k=5, sizes=sizes)
    kept = set(np.argsort(-np.array(logits))[:5].tolist())
    assert set(np.array(sampler(rows)).tolist()) == kept
    zeros = mx.where(mx.arange(vocabulary) % 2 == 0, 0.0, -0.0)  # all as probable as the first
    sampler = VocabParallelSampler(1.0, top_p=0.01, sizes=sizes)
    tokens = sampler(mx.broadcast_to(mine(zeros, sizes), (draws, sizes[rank])))
    assert len(set(np.array(tokens).tolist())) == vocabulary


def inverse_transform() -> None:
    """With uniform numbers: the tokens of mx.random.categorical for single rows, and of a dense sum for several."""
    mx.random.seed(5)
    for vocabulary, temp in product([size, 37, 400], [0.5, 1.0]):
        sizes = sizes_of(vocabulary, uneven=vocabulary == 400)
        logits = mx.where(mx.random.uniform(shape=(40, vocabulary)) < 0.2, -mx.inf, mx.random.normal((40, vocabulary)))
        logits[:, 0] = 0.0
        sampler, uniform, expected = VocabParallelSampler(temp, sizes=sizes), [], []
        for row in range(40):
            mx.random.seed(row)
            expected.append(mx.random.categorical(logits[row : row + 1] * (1 / temp)).item())
            mx.random.seed(row)
            uniform.append(mx.random.uniform(shape=(1,)))
            selected = sampler(mine(logits[row : row + 1], sizes), uniform=uniform[-1])
            assert selected.dtype == mx.uint32
            equal(selected, [expected[-1]], f"row {row} of {vocabulary}, temperature {temp}")
        together = sampler(mine(logits, sizes), uniform=mx.concatenate(uniform))
        equal(together, expected, f"all rows of {vocabulary}, temperature {temp}")
        ends = sampler(mine(logits[:1], sizes), uniform=mx.array([1.0]))  # rounding may give a number as large as this
        assert np.isfinite(np.array(logits)[0, ends.item()])


def dense_log_probs(logits: mx.array, tokens: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return picked - mx.logsumexp(logits, axis=-1)


def log_probs() -> None:
    mx.random.seed(4)
    for dtype, shape, vocabulary in product(DTYPES, [(), (5,), (2, 3)], [size, 37, 300]):
        logits = (mx.random.normal((*shape, vocabulary)) * 3).astype(dtype)
        sizes = sizes_of(vocabulary, uneven=vocabulary != 37)
        tokens = mx.random.randint(0, vocabulary, shape)
        for kind in (mx.int32, mx.uint32, mx.int64, *([mx.uint8] if vocabulary < 256 else [])):
            found = vocab_parallel_log_probs(mine(logits, sizes), tokens.astype(kind), sizes)
            assert found.dtype == mx.float32
            close(found, dense_log_probs(logits, tokens), f"log_probs of {dtype} {shape} {vocabulary}")
    masked = mx.concatenate([mx.full((2, 3), -mx.inf), mx.random.normal((2, 4 * size))], axis=-1)
    sizes = split_sizes("test", masked.shape[-1], size, [1] * size)
    tokens = mx.array([0, 5])
    close(vocab_parallel_log_probs(mine(masked, sizes), tokens, sizes), dense_log_probs(masked, tokens), "with -inf")
    assert vocab_parallel_log_probs(mx.zeros((0, sizes[rank])), mx.zeros((0,), mx.int32), sizes).shape == (0,)


def cross_entropy() -> None:
    mx.random.seed(5)
    options = product([(), (6,), (2, 3)], [0.0, 0.1], ["none", "mean", "sum"], [False, True], [mx.float32, mx.float16])
    for number, (shape, smoothing, reduction, weighted, dtype) in enumerate(options):
        vocabulary = 29
        logits = (mx.random.normal((*shape, vocabulary)) * 3).astype(dtype)
        targets = mx.random.randint(0, vocabulary, shape)
        weights = mx.random.uniform(shape=shape) if weighted else None
        sizes = sizes_of(vocabulary)
        scale = mx.random.normal(shape if reduction == "none" else ())

        def dense(x: mx.array) -> mx.array:
            loss = nn.losses.cross_entropy(
                x.astype(mx.float32), targets, weights, label_smoothing=smoothing, reduction=reduction
            )
            return (loss * scale).sum()

        def parts(x: mx.array) -> mx.array:
            loss = vocab_parallel_cross_entropy(x, targets, sizes, weights, smoothing, reduction)
            return (loss * scale).sum()

        loss, gradient = mx.value_and_grad(dense)(logits)
        for compiled in (False, True) if number == 20 else (False,):  # MLX compiles each for seconds
            form = mx.compile(mx.value_and_grad(parts)) if compiled else mx.value_and_grad(parts)
            value, result = form(mine(logits, sizes))
            what = f"cross_entropy {shape} {smoothing} {reduction} {weighted} {dtype}"
            close(value, loss, what)
            assert result.dtype == dtype
            tolerance = 1e-5 if dtype == mx.float32 else 2e-3
            close(result, mine(gradient, sizes), f"gradient of {what}", tolerance, tolerance)


def traffic() -> None:
    """What a rank sends for a row is what the documentation says, and a small shard of its logits."""
    vocabulary, rows = 131_064, 2  # a multiple of 2, 3 and 4
    sizes = [vocabulary // size] * size
    logits = mx.random.normal((rows, sizes[rank]))
    logits16 = logits.astype(mx.bfloat16)
    tokens = mx.zeros((rows,), mx.int32)
    k = 40
    for name, per_row, collectives, call in [
        ("argmax", 8, 1, lambda: vocab_parallel_argmax(logits, sizes)),
        ("log_probs", 8, 1, lambda: vocab_parallel_log_probs(logits, tokens, sizes)),
        ("temp", 8, 1, lambda: samplers_[0](logits)),
        ("top_k", 8 + 4 * k, 2, lambda: samplers_[1](logits)),
        ("min_p", 8 + 4, 2, lambda: samplers_[2](logits)),
        ("top_p", 8 + 4 + 4 * 1024, 6, lambda: samplers_[3](logits)),
        ("top_p of bfloat16", 8 + 4 + 2 * 1024, 4, lambda: samplers_[3](logits16)),
    ]:
        samplers_ = [VocabParallelSampler(1.0, sizes=sizes, **some) for some in ({}, {"top_k": k}, {"min_p": 0.1})]
        samplers_.append(VocabParallelSampler(1.0, top_p=0.9, sizes=sizes))
        before = group.stats()
        mx.eval(call())
        after = group.stats()
        sent = after["payload_bytes_sent"] - before["payload_bytes_sent"]
        assert after["collectives"] - before["collectives"] == (collectives if size > 1 else 0), name
        # An all_reduce may send everything to everyone where it is small; every other rank gets what a rank gathers.
        assert sent <= 2 * (size - 1) * rows * per_row, f"{name}: {sent} bytes for {rows} rows"
        assert sent * 10 < logits.nbytes * (size - 1) or size == 1, f"{name}: {sent} bytes of {logits.nbytes}"
    before = group.stats()
    loss, gradient = mx.value_and_grad(lambda x: vocab_parallel_cross_entropy(x, tokens, sizes, reduction="mean"))(
        logits
    )
    mx.eval(loss, gradient)
    after = group.stats()
    assert after["collectives"] - before["collectives"] == (size > 1), "the backward pass communicates"


def bad_input() -> None:
    sizes = [5] * size
    vocabulary = sum(sizes)
    odd = size - 1  # the only rank whose argument is wrong
    for words, wrong in [
        ("temp must be at least 0, not -0.5", {"temp": -0.5}),
        ("temp must be at least 0, not nan", {"temp": float("nan")}),
        ("top_p must be from 0 to 1, not 1.5", {"top_p": 1.5}),
        ("min_p must be from 0 to 1, not -1", {"min_p": -1}),
        (f"top_k must be from 0 to the {vocabulary} tokens", {"top_k": vocabulary + 1}),
        ("top_k must be from 0", {"top_k": 2.5}),
        ("min_tokens_to_keep must be from 1", {"min_tokens_to_keep": 0}),
    ]:
        for given in (wrong, wrong if rank == odd else {}):
            refused(words, lambda given=given: VocabParallelSampler(**({"temp": 1.0, "sizes": sizes} | given)))
    if size > 1:
        refused("disagree about the arguments", lambda: VocabParallelSampler(1.0 + (rank == odd), sizes=sizes))
    before = group.stats()["collectives"]
    logits, tokens = mx.zeros((2, 5)), mx.zeros((2,), mx.int32)
    sampler = VocabParallelSampler(sizes=sizes)
    before = group.stats()["collectives"]
    for words, call in [
        ("sizes must be", lambda: vocab_parallel_argmax(logits, [*sizes, 5])),
        ("sizes must be", lambda: vocab_parallel_argmax(logits, [0] * size)),
        (f"rank {rank} holds 5 of the {vocabulary} tokens", lambda: vocab_parallel_argmax(logits[:, :4], sizes)),
        ("must be float16, bfloat16 or float32", lambda: sampler(logits.astype(mx.int32))),
        ("an integer for each row", lambda: vocab_parallel_log_probs(logits, tokens[:1], sizes)),
        ("an integer for each row", lambda: vocab_parallel_log_probs(logits, tokens.astype(mx.float32), sizes)),
        ("reduction must be", lambda: vocab_parallel_cross_entropy(logits, tokens, sizes, reduction="max")),
        ("label_smoothing must be", lambda: vocab_parallel_cross_entropy(logits, tokens, sizes, label_smoothing=1)),
        ("weights have shape", lambda: vocab_parallel_cross_entropy(logits, tokens, sizes, mx.zeros((3,)))),
    ]:
        refused(words, call)
    assert group.stats()["collectives"] == before


run_scenarios(globals())
