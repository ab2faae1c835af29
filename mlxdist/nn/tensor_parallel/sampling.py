"""Tokens, log-probabilities and the loss from logits that are sharded over the vocabulary, never gathered.

Each rank holds the logits of its shard of the vocabulary, as :class:`mlxdist.nn.ParallelLMHead` and
``VocabParallelEmbedding.as_linear`` return them. ``sizes``, the ``sizes`` of that layer, says how many each rank holds.
A rank sends for every row of logits:

    vocab_parallel_argmax           8 bytes: its largest logit and where that is
    vocab_parallel_log_probs        8 bytes: the log-sum-exp of its shard, and the logit of the token if it holds it
    vocab_parallel_cross_entropy    the same; 4 more with label smoothing; nothing in the backward pass
    VocabParallelSampler            8 or 12 bytes for the choice, and for each filter: 4 (min_p), 4 * top_k (top_k),
                                    4 + 1024 a round in 2 to 4 rounds (top_p)

All are lazy and work inside ``mx.compile``. Results are the same on every rank: they are computed from the same
gathered numbers. Logits are float16, bfloat16 or float32; what is computed from them is float32.

Raises, all of them:
    InvalidArgument: logits of another dtype, or whose last dimension is not this rank's entry of ``sizes``; ``sizes``
        that are not one per rank.
    Also the errors of :mod:`mlxdist.runtime.operations.collectives`, where the result is evaluated.
"""

from collections.abc import Sequence
from math import inf, isfinite, log
from numbers import Integral, Real
from typing import Any

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather, all_max, all_sum

from ..layout.partition import check_sizes, own_tokens, shard_slice
from ..rank_checks import agreed

__all__ = ["VocabParallelSampler", "vocab_parallel_argmax", "vocab_parallel_cross_entropy", "vocab_parallel_log_probs"]

# The noise of this many neighbouring tokens comes from one key, whichever rank holds them.
NOISE_BLOCK = 1024

# Bits of a float32 below which the values of these dtypes have only zeros; digits are 8 bits.
_DIGITS = {mx.bfloat16: 2, mx.float16: 3, mx.float32: 4}


def vocab_parallel_argmax(logits: mx.array, sizes: Sequence[int], *, group: GroupLike | None = None) -> mx.array:
    """The token with the largest logit, the first of equal ones, as ``mx.argmax(all_logits, axis=-1)``.

    Args:
        logits: shape (..., sizes[rank]).
        sizes: all ranks' shards of the vocabulary, in rank order.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Returns:
        uint32, shape (...).
    """
    group = group_of(group)
    here = _place("vocab_parallel_argmax", logits, sizes, group)
    return _argmax(logits.astype(mx.float32), here, group)


def vocab_parallel_log_probs(
    logits: mx.array, tokens: mx.array, sizes: Sequence[int], *, group: GroupLike | None = None
) -> mx.array:
    """The log-probability of each token: its logit less the log-sum-exp of all ranks' logits.

    Args:
        logits: shape (..., sizes[rank]).
        tokens: integers from 0 to ``sum(sizes) - 1``, shape (...), the same on all ranks. A number outside, which
            cannot be seen before it is evaluated, counts as a token of logit 0.
        sizes, group: as for :func:`vocab_parallel_argmax`.

    Returns:
        float32, shape (...). Its gradient by ``logits`` is that of the dense formula, for this rank's shard.
    """
    picked, log_sum_exp = _row_values("vocab_parallel_log_probs", logits, tokens, sizes, group_of(group))
    return picked - log_sum_exp


def vocab_parallel_cross_entropy(
    logits: mx.array,
    targets: mx.array,
    sizes: Sequence[int],
    weights: mx.array | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "none",
    *,
    group: GroupLike | None = None,
) -> mx.array:
    """``mx.nn.losses.cross_entropy`` of logits that are sharded over the vocabulary (Shoeybi et al. 2019, section 3).

    Args:
        logits, sizes, group: as for :func:`vocab_parallel_argmax`.
        targets: integers from 0 to ``sum(sizes) - 1``, shape (...), as in :func:`vocab_parallel_log_probs`.
        weights: of each target, shape (...).
        label_smoothing: the share of the target that is spread over the vocabulary, at least 0 and less than 1.
        reduction: "none", "mean" or "sum".

    Returns:
        float32: the loss of each target, or their mean or sum. Its gradient by ``logits`` is that of the dense
        formula, for this rank's shard; nothing is sent for it.

    Raises:
        InvalidArgument: ``targets`` or ``weights`` of another shape, a wrong ``label_smoothing`` or ``reduction``.
    """
    name = "vocab_parallel_cross_entropy"
    if not 0 <= label_smoothing < 1:
        raise InvalidArgument(f"{name}: label_smoothing must be at least 0 and less than 1, not {label_smoothing}")
    if reduction not in ("none", "mean", "sum"):
        raise InvalidArgument(f"{name}: reduction must be 'none', 'mean' or 'sum', not {reduction!r}")
    if weights is not None and weights.shape != targets.shape:
        raise InvalidArgument(f"{name}: weights have shape {weights.shape}, targets {targets.shape}")
    smooth = label_smoothing > 0
    picked, log_sum_exp, *total = _row_values(name, logits, targets, sizes, group_of(group), smooth)
    loss = log_sum_exp - picked
    if smooth:
        loss = log_sum_exp - (1 - label_smoothing) * picked - label_smoothing * (total[0] / sum(sizes))
    if weights is not None:
        loss = loss * weights
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


class VocabParallelSampler:
    """Chooses tokens at random as mlx-lm's ``make_sampler`` does, from logits that are sharded over the vocabulary.

    Called with logits of shape (..., sizes[rank]), and optionally a ``key`` of ``mx.random.key``, it returns tokens,
    uint32 of shape (...), the same on all ranks. It takes logits or log-probabilities: a constant added to a row
    changes nothing.

    The filters are mlx-lm's, in its order, before the temperature: top_p keeps the most probable tokens up to the one
    that brings their probability to ``top_p``, and those as probable as that one; min_p those at least ``min_p`` times
    as probable as the first, but no fewer than ``min_tokens_to_keep``; top_k the ``top_k`` most probable. Equally
    probable tokens are kept by top_k and min_tokens_to_keep from the lowest number on. All are exact: the threshold of
    top_p is one of the logits, found by radix selection, up to the rounding of sums in float32.

    The choice is the largest of logit / temp + Gumbel noise ("Gumbel-max"; Gumbel 1954). The noise of a token depends
    on the key, the row and the token alone, so that the same key gives the same token on any number of ranks. Without
    ``key`` it comes from MLX's global random state: seed it alike on all ranks for that, or not at all. All ranks get
    the same token in any case.

    With ``uniform``, numbers from 0 to 1 of shape (...), the choice is the first token up to which the probabilities
    add up to more ("inverse transform sampling"), as ``mx.random.categorical`` chooses for a single row, up to the
    rounding of sums. A rank then sends 12 bytes.

    Args:
        temp: the temperature; 0 takes the most probable token, without filters and noise.
        top_p: from 0 to 1; 0 and 1 keep all tokens.
        min_p: from 0 to 1; 0 keeps all tokens.
        min_tokens_to_keep: at least 1.
        top_k: from 0 to the size of the vocabulary; 0 keeps all tokens.
        sizes: all ranks' shards of the vocabulary, in rank order.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``. All of them make the sampler, together.

    Raises:
        InvalidArgument: on all ranks, if an argument is out of range on one.
        Mismatch: on all ranks, if they differ.
    """

    def __init__(
        self,
        temp: float = 0.0,
        top_p: float = 0.0,
        min_p: float = 0.0,
        min_tokens_to_keep: int = 1,
        top_k: int = 0,
        *,
        sizes: Sequence[int],
        group: GroupLike | None = None,
    ) -> None:
        self._group = group_of(group)
        self.temp, self.top_p, self.min_p = temp, top_p, min_p
        self.min_tokens_to_keep, self.top_k = min_tokens_to_keep, top_k
        self.sizes = list(sizes)
        values = (temp, top_p, min_p, min_tokens_to_keep, top_k, self.sizes)
        with agreed("VocabParallelSampler", self._group, values):
            self._check()

    def __call__(self, logits: mx.array, key: mx.array | None = None, *, uniform: mx.array | None = None) -> mx.array:
        here = _place("VocabParallelSampler", logits, self.sizes, self._group)
        x = logits.astype(mx.float32)
        if self.temp == 0 or x.size == 0:
            return _argmax(x, here, self._group)
        x = x.reshape(-1, x.shape[-1])
        if 0 < self.top_p < 1:
            x = self._top_p(x, _DIGITS[logits.dtype])
        if self.min_p > 0:
            x = self._min_p(x)
        if self.top_k > 0:
            x = mx.where(self._among_largest(x, self.top_k), x, -mx.inf)
        x = x * (1 / self.temp)
        if uniform is not None:
            return self._where_it_exceeds(x, uniform.reshape(-1, 1), here).reshape(logits.shape[:-1])
        noise = gumbel_noise(x.shape[0], here, sum(self.sizes), key)
        return _argmax(x + noise, here, self._group).reshape(logits.shape[:-1])

    def _check(self) -> None:
        name = "VocabParallelSampler"
        check_sizes(name, self.sizes, self._group)
        for argument, most in (("temp", inf), ("top_p", 1), ("min_p", 1)):
            value = getattr(self, argument)
            if not isinstance(value, Real) or not isfinite(value) or not 0 <= float(value) <= most:
                must = "at least 0" if most == inf else "from 0 to 1"
                raise InvalidArgument(f"{name}: {argument} must be {must}, not {value!r}")
        for argument, least in (("min_tokens_to_keep", 1), ("top_k", 0)):
            value = getattr(self, argument)
            if not isinstance(value, Integral) or not least <= int(value) <= sum(self.sizes):
                raise InvalidArgument(
                    f"{name}: {argument} must be from {least} to the {sum(self.sizes)} tokens of the vocabulary, not "
                    f"{value!r}"
                )

    def _top_p(self, x: mx.array, digits: int) -> mx.array:
        """Radix selection of the smallest value above which less than top_p of the probability lies."""
        probabilities = mx.exp(x - self._top(x))
        bits = mx.where(x == 0, 0, x).view(mx.uint32)  # -0.0 is as probable as 0.0
        # The order of these integers is that of the floats.
        order = mx.where(bits >> 31 == 1, ~bits, bits | 0x80000000)
        rows = mx.arange(x.shape[0])[:, None]
        threshold = mx.zeros((x.shape[0], 1), mx.uint32)  # its digits so far
        above = mx.zeros(())  # the probability of what is above all values with these digits
        limit = None  # that to keep
        for digit in range(digits):
            shift = 24 - 8 * digit
            at_threshold = probabilities
            if digit > 0:
                at_threshold = mx.where(order >> (shift + 8) == threshold, probabilities, 0)
            masses = mx.zeros((x.shape[0], 256)).at[rows, (order >> shift) & 255].add(at_threshold)
            masses = all_sum(masses, group=self._group)
            higher = mx.cumsum(masses, axis=-1, reverse=True, inclusive=False)
            if limit is None:
                limit = self.top_p * (higher[:, :1] + masses[:, :1])
            else:
                higher = higher + above
            lowest = mx.argmax(higher < limit, axis=-1, keepdims=True)
            above = mx.take_along_axis(higher, lowest, axis=-1)
            threshold = (threshold << 8) | lowest
        return mx.where(order >> shift >= threshold, x, -mx.inf)

    def _min_p(self, x: mx.array) -> mx.array:
        keep = x >= self._top(x) + log(self.min_p)
        if self.min_tokens_to_keep > 1:
            keep = keep | self._among_largest(x, self.min_tokens_to_keep)
        return mx.where(keep, x, -mx.inf)

    def _where_it_exceeds(self, x: mx.array, uniform: mx.array, here: slice) -> mx.array:
        """The first token up to which the probabilities add up to more than ``uniform``, shape (rows, 1)."""
        summed = mx.cumsum(mx.exp(x - self._top(x)), axis=-1)
        masses = _gather(summed[:, -1:], self._group)  # (ranks, rows, 1)
        until = mx.cumsum(masses, axis=0)
        target = uniform * until[-1]
        # Sums are rounded: not behind the last rank, or the last token, that is probable.
        owner = mx.minimum((until <= target).sum(axis=0), (until < until[-1]).sum(axis=0))
        rank = self._group.rank()
        place = (summed <= target - (until[rank] - masses[rank])).sum(axis=-1, keepdims=True)
        last = (summed < summed[:, -1:]).sum(axis=-1, keepdims=True)
        mine = mx.where(owner == rank, here.start + mx.minimum(place, last), 0)
        return all_sum(mine.astype(mx.uint32), group=self._group)

    def _top(self, x: mx.array) -> mx.array:
        """The largest value of each row over all ranks, shape (rows, 1)."""
        return all_max(x.max(axis=-1, keepdims=True), group=self._group)

    def _among_largest(self, x: mx.array, k: int) -> mx.array:
        """Whether each value is one of its row's k largest of all ranks; of equal ones the first are."""
        longest = min(k, max(self.sizes))
        mine = mx.topk(x, min(k, x.shape[-1]), axis=-1)
        mine = mx.pad(mine, [(0, 0), (0, longest - mine.shape[-1])], constant_values=-mx.inf)
        largest = _gather(mine, self._group)  # (ranks, rows, longest)
        merged = largest.transpose(1, 0, 2).reshape(x.shape[0], -1)
        last = mx.sort(merged, axis=-1)[:, -k][:, None]  # the k-th largest
        room = k - (merged > last).sum(axis=-1, keepdims=True)  # for values that are equal to it
        # A rank that sends only some of its equal values sends as many as there is room for.
        before = (largest[: self._group.rank()] == last).sum(axis=(0, 2))[:, None]
        equal = x == last
        return (x > last) | (equal & (before + mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))


def gumbel_noise(rows: int, here: slice, vocabulary: int, key: mx.array | None) -> mx.array:
    """Gumbel noise for the tokens ``here``, shape (rows, tokens): the same numbers for a token on any rank."""
    if key is None:
        key = mx.random.randint(0, 2**31 - 1, (2,), mx.int32).astype(mx.uint32)
    blocks = -(-vocabulary // NOISE_BLOCK)
    keys = mx.random.split(key, rows * blocks).reshape(rows, blocks, 2)
    first, last = here.start // NOISE_BLOCK, -(-here.stop // NOISE_BLOCK)
    mine = keys[:, first:last].reshape(-1, 2)
    noise = mx.vmap(lambda key: mx.random.gumbel((NOISE_BLOCK,), key=key))(mine).reshape(rows, -1)
    offset = here.start - first * NOISE_BLOCK
    return noise[:, offset : offset + here.stop - here.start]


def _argmax(x: mx.array, here: slice, group: Group) -> mx.array:
    if x.size == 0:
        return mx.zeros(x.shape[:-1], mx.uint32)
    index = mx.argmax(x, axis=-1, keepdims=True)
    value = mx.take_along_axis(x, index, axis=-1).view(mx.uint32)
    both = _gather(mx.concatenate([value, index + here.start], axis=-1), group)
    best = mx.argmax(both[..., 0].view(mx.float32), axis=0, keepdims=True)
    return mx.take_along_axis(both[..., 1], best, axis=0)[0]


def _row_values(
    name: str, logits: mx.array, tokens: mx.array, sizes: Sequence[int], group: Group, with_sum: bool = False
) -> Sequence[mx.array]:
    """The tokens' logits, the rows' log-sum-exp and, if asked for, the rows' sums, in float32; one all_gather."""
    here = _place(name, logits, sizes, group)
    if not mx.issubdtype(tokens.dtype, mx.integer) or tokens.shape != logits.shape[:-1]:
        raise InvalidArgument(
            f"{name}: there must be an integer for each row of the logits {logits.shape}, not {tokens.dtype} of shape "
            f"{tokens.shape}"
        )
    if logits.size == 0:
        return [mx.zeros(tokens.shape)] * (3 if with_sum else 2)
    mine, local = own_tokens(tokens, here)
    index = local[..., None]

    @mx.custom_function
    def values(x: mx.array) -> list[mx.array]:
        x = x.astype(mx.float32)
        picked = mx.where(mine, mx.take_along_axis(x, index, axis=-1)[..., 0], 0)
        own = [picked, mx.logsumexp(x, axis=-1), *([x.sum(axis=-1)] if with_sum else [])]
        parts = _gather(mx.stack(own), group)  # (ranks, 2 or 3, ...)
        sums = [parts[:, 2].sum(axis=0)] if with_sum else []
        return [parts[:, 0].sum(axis=0), mx.logsumexp(parts[:, 1], axis=0), *sums]

    @values.vjp
    def gradient(x: mx.array, cotangents: list[mx.array], outputs: list[mx.array]) -> mx.array:
        softmax = mx.exp(x.astype(mx.float32) - outputs[1][..., None])
        target = mine[..., None] & (mx.arange(x.shape[-1]) == index)
        result = softmax * cotangents[1][..., None] + mx.where(target, cotangents[0][..., None], 0)
        if with_sum:
            result = result + cotangents[2][..., None]
        return result.astype(x.dtype)

    found: Any = values(logits)
    return found


def _gather(x: mx.array, group: Group) -> mx.array:
    """All ranks' ``x``, shape (ranks, ...)."""
    return all_gather(x[None], group=group)


def _place(name: str, logits: mx.array, sizes: Sequence[int], group: Group) -> slice:
    """The slice of the vocabulary that this rank's logits are for. Raises InvalidArgument where they do not fit."""
    check_sizes(name, sizes, group)
    if logits.dtype not in _DIGITS:
        raise InvalidArgument(f"{name}: logits must be float16, bfloat16 or float32, not {logits.dtype}")
    mine = sizes[group.rank()]
    if logits.ndim == 0 or logits.shape[-1] != mine:
        raise InvalidArgument(
            f"{name}: logits have shape {logits.shape}, but rank {group.rank()} holds {mine} of the {sum(sizes)} "
            f"tokens (sizes={list(sizes)})"
        )
    return shard_slice(sizes, group.rank())
