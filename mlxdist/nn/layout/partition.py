"""How one dimension of an array is sharded over the ranks: in equal shards or in proportion to the ranks' shares, in
whole multiples.

``sizes`` is always the list of all ranks' sizes along the sharded axis, in rank order, equal on all ranks. ``segments``
says that the dimension is made of pieces that are sharded each by itself, so that a rank holds its shard of every
piece: those of a fused QKV projection, or the two of merged gate and up. It is a number of equal pieces, or their
sizes, or anything in proportion to them: ``(32, 8, 8)`` for 32 heads of queries and 8 of keys and values. A rank holds
its shards of the pieces one after the other.

All raise InvalidArgument, the same on every rank and before anything is sent, for arguments that do not fit.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, isfinite
from numbers import Integral, Real

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_sum

from ..mappings import gather_from_tensor_parallel_region, with_backward, with_gradients
from .measured_shares import RankShares, resolve

Segments = int | Sequence[int]


def split_sizes(
    name: str, total: int, ranks: int, rank_shares: RankShares | None = None, multiple: int = 1, segments: Segments = 1
) -> list[int]:
    """How many of ``total`` each rank holds: equal shards, or in proportion to ``rank_shares``, one positive number a
    rank.

    ``rank_shares`` may be "memory" or "compute": the measured speeds of the ranks
    (:mod:`mlxdist.nn.layout.measured_shares`).

    Every rank holds a positive multiple of ``multiple`` (a head, a quantization group) of each segment, and the same
    share of all segments. With ``rank_shares`` the shares are as near to them as that allows: by largest remainder, the
    lower rank first where two are equal; a rank that would get nothing gets one from the largest.

    Raises:
        InvalidArgument: a segment is no multiple of ``multiple``; there are fewer shares than ranks; without
            ``rank_shares``: the shares do not divide evenly by the ranks; ``rank_shares`` are not ``ranks`` positive
            numbers. The message begins with ``name``.
    """
    require_counts(name, total=total, ranks=ranks, multiple=multiple)
    total, ranks, multiple = int(total), int(ranks), int(multiple)
    shares = checked_rank_shares(name, rank_shares, ranks)
    lengths = segment_lengths(name, total, segments)
    for length in lengths:
        if length % multiple != 0:
            of = f"{total}" if len(lengths) == 1 else f"the segment of {length} among {list(lengths)}"
            raise InvalidArgument(f"{name}: {of} cannot be split into whole multiples of {multiple}")
    units = gcd(*(length // multiple for length in lengths))
    unit = total // units
    if units < ranks:
        raise InvalidArgument(
            f"{name}: {_described(total, unit, lengths, multiple)} is too little for {ranks} ranks, each of which "
            f"needs at least {unit}"
        )
    if shares is None and units % ranks != 0:
        raise InvalidArgument(
            f"{name}: {_described(total, unit, lengths, multiple)} cannot be split into {ranks} equal shards; choose a "
            "number of ranks that divides it, or give rank_shares=[...] for shards that are not equal"
        )
    if shares is None:
        return [total // ranks] * ranks
    return [unit * share for share in _shares(units, shares)]


def require_counts(name: str, **numbers: object) -> None:
    """Rejects numbers that are no positive integers, by the names of the arguments."""
    for argument, number in numbers.items():
        if not _is_count(number):
            raise InvalidArgument(f"{name}: {argument} must be a positive integer, not {number!r}")


def segment_lengths(name: str, total: int, segments: Segments = 1) -> tuple[int, ...]:
    """The lengths of the segments of a dimension of ``total``. Errors begin with ``name``."""
    if isinstance(segments, Integral):
        ratios = (1,) * int(segments)
    else:
        ratios = tuple(segments) if isinstance(segments, Sequence) else ()
    if not ratios or not all(_is_count(ratio) for ratio in ratios):
        raise InvalidArgument(f"{name}: segments must be a positive integer or a list of them, not {segments!r}")
    if total % sum(ratios) and any(total * ratio % sum(ratios) for ratio in ratios):
        raise InvalidArgument(f"{name}: {total} cannot be split into segments in the proportion {list(ratios)}")
    return tuple(total * int(ratio) // sum(ratios) for ratio in ratios)


def shard_slice(sizes: Sequence[int], rank: int) -> slice:
    """The slice of a dimension of one segment that is the shard of ``rank``."""
    return slices(sizes, rank)[0]


def slices(sizes: Sequence[int], rank: int, segments: Segments = 1) -> list[slice]:
    """The slices of a dimension that are the shards of ``rank``, one for each segment."""
    if not 0 <= rank < len(sizes):
        raise InvalidArgument(f"slices: rank is {rank}, but there are sizes for {len(sizes)} ranks")
    found, start = [], 0
    total, before = sum(sizes), sum(sizes[:rank])
    for length in segment_lengths("slices", total, segments):
        if any(length * size % total for size in sizes):
            raise InvalidArgument(f"slices: the segment of {length} cannot be sharded in the proportion {list(sizes)}")
        first = start + length * before // total
        found.append(slice(first, first + length * sizes[rank] // total))
        start += length
    return found


def take(x: mx.array, axis: int, sizes: Sequence[int], rank: int, segments: Segments = 1) -> mx.array:
    """The shard of ``rank`` of ``x``, whose dimension ``axis`` is split into ``sizes``: ``sizes[rank]`` long along it.

    A copy of its own, so that ``x`` can be freed. Dtype of ``x``.
    """
    axis = _axis("take", x, axis, sum(sizes))
    return mx.contiguous(slice_along(x, axis, slices(sizes, rank, segments)))


def scaled(sizes: Sequence[int], length: int) -> list[int]:
    """``sizes`` of a dimension that holds the same in ``length`` elements: packed into words, or one for a group."""
    return [size * length // sum(sizes) for size in sizes]


def own_tokens(tokens: mx.array, here: slice) -> tuple[mx.array, mx.array]:
    """Which of ``tokens`` lie in this rank's shard ``here`` of the vocabulary, and where in it; the others at 0."""
    tokens = tokens.astype(mx.int64)  # compared as uint8, a bound of 300 would be 44
    mine = (tokens >= here.start) & (tokens < here.stop)
    return mine, mx.where(mine, tokens - here.start, 0)


def join(
    x: mx.array, axis: int, sizes: Sequence[int], group: GroupLike | None = None, segments: Segments = 1
) -> mx.array:
    """All ranks' shards, joined along ``axis`` as they were before :func:`take`, by one lazy all_gather; shards of
    different sizes are padded for it. Backward: this rank's shard of the cotangent."""
    group = group_of(group)
    check_sizes("join", sizes, group)
    axis = _axis("join", x, axis, sizes[group.rank()])
    places = [slices(sizes, rank, segments) for rank in range(len(sizes))]
    if group.size() == 1:
        return x
    return with_backward(
        lambda x: _join(x, axis, sizes, places, group), lambda y: slice_along(y, axis, places[group.rank()]), x
    )


def scatter(x: mx.array, axis: int, sizes: Sequence[int], group: GroupLike | None = None) -> mx.array:
    """This rank's shard of an ``x`` that is the same on all ranks. Backward: all ranks' cotangents, joined.

    :func:`mlxdist.nn.scatter_to_tensor_parallel_region` for shards of different sizes.
    """
    group = group_of(group)
    check_sizes("scatter", sizes, group)
    axis = _axis("scatter", x, axis, sum(sizes))
    if group.size() == 1:
        return x
    mine = [shard_slice(sizes, group.rank())]
    return with_backward(lambda x: slice_along(x, axis, mine), lambda y: join(y, axis, sizes, group), x)


def slice_along(x: mx.array, axis: int, places: Sequence[slice]) -> mx.array:
    """The slices ``places`` of ``x`` along ``axis``, from 0, one after the other.

    The graph is the same for all slices, and so is the order of its collectives on all ranks: with
    constant bounds MLX leaves out a slice of all or of nothing.
    """
    pieces = [
        mx.slice(x, mx.array([place.start]), (axis,), (*x.shape[:axis], place.stop - place.start, *x.shape[axis + 1 :]))
        for place in places
    ]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis)


def copy_to_holders(x: mx.array, pieces: Sequence[slice], length: int, axis: int, group: Group) -> mx.array:
    """``x`` itself, which is the ``pieces`` of something along ``axis``, where that has ``length``; a piece may come
    more than once. Backward: for each element the sum of the cotangents of all its copies, on all ranks."""
    # By numbers and by the adjoint of take(): MLX leaves out a slice of all or of nothing, and at[...].add dimensions
    # of length 1, and so the graphs of the ranks would differ, and with them the order of their collectives.
    places = mx.array([place for piece in pieces for place in range(piece.start, piece.stop)])

    def backward(cotangents: Sequence[mx.array]) -> list[mx.array]:
        whole = mx.zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]), cotangents[0].dtype)
        _, (whole,) = mx.vjp(lambda whole: mx.take(whole, places, axis), [whole], list(cotangents))
        return [mx.take(all_sum(whole, group=group), places, axis)]

    return with_gradients(backward, [x])[0]


def _join(x: mx.array, axis: int, sizes: Sequence[int], places: list[list[slice]], group: Group) -> mx.array:
    """``places``: the slices of every rank in the full array, one for each segment."""
    longest = max(sizes)
    if min(sizes) < longest:  # on all ranks: mx.pad would give the longest shard another graph
        padded = mx.zeros((*x.shape[:axis], longest, *x.shape[axis + 1 :]), x.dtype)
        x = mx.slice_update(padded, x, mx.array([0]), (axis,))
    gathered = gather_from_tensor_parallel_region(x, axis, group=group)
    if len(places[0]) == 1 and min(sizes) == longest:
        return gathered
    starts = [longest * rank for rank in range(len(sizes))]
    found = []
    for of_segment in zip(*places):
        for rank, place in enumerate(of_segment):
            length = place.stop - place.start
            found.append(slice(starts[rank], starts[rank] + length))
            starts[rank] += length
    return slice_along(gathered, axis, found)


def _axis(name: str, x: mx.array, axis: int, length: int) -> int:
    """``axis`` from 0; it must be ``length`` long."""
    if not -x.ndim <= axis < x.ndim:
        raise InvalidArgument(f"{name}: axis is {axis}, but x has shape {x.shape}")
    if x.shape[axis] != length:
        raise InvalidArgument(f"{name}: axis {axis} of shape {x.shape} must be {length} long")
    return axis % x.ndim


def check_sizes(name: str, sizes: Sequence[int], group: Group) -> None:
    """Rejects ``sizes`` that are not a positive number for each rank."""
    if len(sizes) != group.size() or not all(_is_count(size) for size in sizes):
        raise InvalidArgument(
            f"{name}: sizes must be {group.size()} positive integers, one per rank, not {list(sizes)}"
        )


def checked_rank_shares(
    name: str, rank_shares: RankShares | None, ranks: int, holder: str = "rank"
) -> list[Fraction] | None:
    """``rank_shares`` as fractions, checked as by :func:`split_sizes`. ``holder``: what each of them is of."""
    rank_shares = resolve(name, rank_shares, ranks)
    if rank_shares is None:
        return None
    rank_shares = list(rank_shares)
    if len(rank_shares) != ranks:
        raise InvalidArgument(f"{name}: rank_shares must be {ranks} numbers, one per {holder}, not {rank_shares}")
    if not all(isinstance(share, Real) and isfinite(share) and share > 0 for share in rank_shares):
        raise InvalidArgument(f"{name}: rank_shares must be positive numbers, not {rank_shares}")
    # NumPy's numbers are taken, too, but would overflow in fractions.
    return [Fraction(int(share) if isinstance(share, Integral) else float(share)) for share in rank_shares]


def _shares(units: int, rank_shares: list[Fraction]) -> list[int]:
    """Shares by largest remainder, in exact fractions: floating point may differ between the ranks' machines."""
    quotas = [units * share / sum(rank_shares) for share in rank_shares]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda rank: (shares[rank] - quotas[rank], rank))
    for rank in by_remainder[: units - sum(shares)]:
        shares[rank] += 1
    for rank, share in enumerate(shares):
        if share == 0:
            shares[shares.index(max(shares))] -= 1
            shares[rank] = 1
    return shares


def _described(total: int, unit: int, lengths: Sequence[int], multiple: int) -> str:
    """``12``, ``12 in multiples of 4``, ``12 in multiples of 6 (segments [8, 4])``."""
    text = f"{total}" if unit == 1 else f"{total} in multiples of {unit}"
    if len(lengths) == 1:
        return text
    each = f", each in multiples of {multiple}" if multiple > 1 else ""
    return f"{text} (segments {list(lengths)}{each})"


def _is_count(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) > 0
