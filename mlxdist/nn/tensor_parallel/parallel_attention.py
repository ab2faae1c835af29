"""Attention whose heads are sharded over the ranks (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053).

Grouped queries: Ainslie et al. 2023, "GQA", arXiv:2305.13245.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from math import gcd
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.arguments import group_of

from ..layout.measured_shares import RankShares, resolve
from ..layout.modules import parameters
from ..layout.partition import copy_to_holders, require_counts, shard_slice, split_sizes
from ..mappings import copy_to_tensor_parallel_region
from ..rank_checks import agreed, described
from .column_parallel import ColumnParallelLinear
from .linear_layers import check_has, check_parts, dims, mapped, quantization_unit
from .parallel_linear import ParallelLinear
from .row_parallel import RowParallelLinear

__all__ = ["NORMS", "PROJECTIONS", "ParallelAttention", "head_dim_of", "heads_of", "split_heads"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")


def split_heads(
    name: str, n_heads: int, n_kv_heads: int, ranks: int, rank_shares: RankShares | None = None, multiple: int = 1
) -> tuple[list[int], list[range]]:
    """How many query heads each rank holds, and which KV heads: those that its query heads need.

    With at least as many KV heads as ranks every rank gets whole KV groups. With fewer, KV heads are held by several
    ranks, and the query heads of a group are divided among them: equally over all ranks where that is possible,
    otherwise each rank has one KV head, and each KV head a run of ranks of about the same weight. ``rank_shares``: one
    positive number a rank; ``multiple``: every rank's query heads are a multiple of it. Raises InvalidArgument, whose
    text begins with ``name``, also where a rank would hold KV heads that differ in their number of query heads.
    """
    require_counts(name, n_heads=n_heads, n_kv_heads=n_kv_heads)
    if n_heads % n_kv_heads != 0:
        raise InvalidArgument(f"{name}: {n_heads} query heads are not a multiple of {n_kv_heads} KV heads")
    each = n_heads // n_kv_heads
    rank_shares = resolve(name, rank_shares, ranks)
    if n_kv_heads >= ranks:
        groups = split_sizes(f"{name}: KV heads", n_kv_heads, ranks, rank_shares, multiple // gcd(multiple, each))
        sizes = [each * size for size in groups]
    elif ranks % n_kv_heads == 0:
        sharing = ranks // n_kv_heads  # ranks that hold the same KV head
        what = f"{name}: query heads of a KV head"
        sizes = []
        for first in range(0, ranks, sharing):
            shares_of_head = None if rank_shares is None else list(rank_shares)[first : first + sharing]
            sizes += split_sizes(what, each, sharing, shares_of_head, multiple)
    else:
        sizes = split_sizes(f"{name}: query heads", n_heads, ranks, rank_shares, multiple)
        if rank_shares is not None and _uneven_rank(sizes, each) is not None:
            sizes = _one_kv_head_each(f"{name}: query heads of a KV head", n_kv_heads, each, rank_shares, multiple)
    if (rank := _uneven_rank(sizes, each)) is not None:
        here = shard_slice(sizes, rank)
        raise InvalidArgument(
            f"{name}: {n_heads} query heads of {n_kv_heads} KV heads cannot be split into {sizes}: rank {rank} would "
            f"hold query heads {here.start} to {here.stop - 1}, not equally many of each of its KV heads; choose a "
            "number of ranks that divides the KV heads or is a multiple of them, or give rank_shares=[...]"
        )
    places = [shard_slice(sizes, rank) for rank in range(ranks)]
    return sizes, [range(here.start // each, (here.stop - 1) // each + 1) for here in places]


def heads_of(
    name: str, attention: nn.Module, ranks: int, rank_shares: RankShares | None
) -> tuple[list[int], list[range], int]:
    """The result of :func:`split_heads` for a module like Llama's attention, and the features of a head. No
    quantization group of o_proj is sharded. Raises InvalidArgument also for another kind of module."""
    check_has(name, attention, (*PROJECTIONS, "n_heads", "n_kv_heads", "scale", "rope"), "Llama attention")
    check_parts(name, attention, PROJECTIONS, (*NORMS, "rope"))
    head_dim = head_dim_of(name, attention, [dims(attention[key]) for key in PROJECTIONS])
    unit = quantization_unit(attention.o_proj)
    if unit > 1:
        name = f"{name} (o_proj has quantization groups of {unit}, heads {head_dim} features)"
    multiple = unit // gcd(unit, head_dim)
    return *split_heads(name, attention.n_heads, attention.n_kv_heads, ranks, rank_shares, multiple), head_dim


def _uneven_rank(sizes: Sequence[int], each: int) -> int | None:
    """The first rank that would hold KV heads with different numbers of their ``each`` query heads; None: none."""
    for rank in range(len(sizes)):
        here = shard_slice(sizes, rank)
        if len(set(Counter(head // each for head in range(here.start, here.stop)).values())) > 1:
            return rank
    return None


def _one_kv_head_each(name: str, n_kv_heads: int, each: int, rank_shares: Sequence[float], multiple: int) -> list[int]:
    """How many query heads each rank holds, where it has one KV head: runs of ranks are as near as can be to equal
    shares of the total."""
    before, most = [0, *accumulate(rank_shares)], each // multiple
    sizes: list[int] = []
    for head in range(n_kv_heads):
        first, left = len(sizes), n_kv_heads - head - 1  # KV heads behind this one, with a rank each at least
        stops = range(max(first + 1, len(rank_shares) - left * most), min(first + most, len(rank_shares) - left) + 1)
        stop = min(stops, key=lambda stop: abs(before[stop] * n_kv_heads - before[-1] * (head + 1)), default=first + 1)
        sizes += split_sizes(name, each, stop - first, rank_shares[first:stop], multiple)
    return sizes


class ParallelAttention(nn.Module):
    """Attention of mlx-lm's Llama and Qwen3 whose heads are sharded over the ranks, with one all_sum.

    Called with ``x`` of shape (batch, length, dims), the same on all ranks, and mlx-lm's ``mask`` and ``cache``, it
    returns the same shape and dtype, the same on all ranks. The cache holds this rank's KV heads alone. A ``mask`` is
    None, "causal", or an array that broadcasts to (batch, n_heads, length, keys) for all ranks' heads.

    Where there are fewer KV heads than ranks, several ranks hold the same one. All gradients are the dense layer's: a
    KV head that several ranks hold, and the norms, which all hold, have the sum over the ranks. Forward: one all_sum,
    or a sum_scatter with ``sequence_parallel``. Backward: one all_sum of the gradient of ``x``, one for each norm, and
    for each weight of k_proj and v_proj where KV heads are shared. LoRA goes on q_proj and o_proj, and on k_proj and
    v_proj where KV heads are not shared.

    Attributes, as mlx-lm reads them: ``n_heads`` and ``n_kv_heads`` of this rank, ``head_dim``, ``scale``, ``rope``;
    ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``q_norm``, ``k_norm``. Two lists have an entry for each rank:
    ``heads``, its number of query heads, and ``kv_heads``, its range of KV heads.

    Args:
        dims: features of the input and the output.
        n_heads: query heads of all ranks.
        n_kv_heads: KV heads of all ranks; ``None`` for as many.
        head_dim: of a head; ``None`` for dims // n_heads.
        bias: whether the projections have one.
        rope: positions: a callable with mlx-lm's signature, ``rope(x, offset=...)``; ``None`` for none.
        q_norm, k_norm: of each head's queries and keys: modules such as ``nn.RMSNorm(head_dim)``; ``None`` for none.
        scale: of the scores; ``None`` for head_dim ** -0.5.
        sequence_parallel: ``x`` and the result are this rank's equal shard of the sequence.
        rank_shares: one positive number a rank, to shard the heads in proportion to; KV groups stay whole where there
            are at least as many as ranks.
        group: the ranks, which make the layer together; ``None`` is the group of ``mlxdist.init()``.

    The initial values are this rank's shard of those of dense layers: use the same seed on all ranks.

    Raises:
        InvalidArgument: on all ranks, if the heads cannot be sharded so, see :func:`split_heads`.
        Mismatch: on all ranks, if arguments differ.
    """

    def __init__(
        self,
        dims: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        rope: Callable | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        scale: float | None = None,
        sequence_parallel: bool = False,
        rank_shares: Sequence[float] | None = None,
        group: GroupLike | None = None,
    ) -> None:
        group = group_of(group)
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        values = (dims, n_heads, n_kv_heads, head_dim, bias, scale, sequence_parallel, rank_shares)
        with agreed("ParallelAttention", group, *values, {"q_norm": described(q_norm), "k_norm": described(k_norm)}):
            split_heads("ParallelAttention", n_heads, n_kv_heads, group.size(), rank_shares)
            if head_dim is None and dims % n_heads != 0:
                raise InvalidArgument(
                    f"ParallelAttention: {dims} dims are no multiple of {n_heads} heads; give head_dim"
                )
            head_dim = dims // n_heads if head_dim is None else head_dim
            whole = nn.Module()
            whole.q_proj = nn.Linear(dims, n_heads * head_dim, bias)
            whole.k_proj = nn.Linear(dims, n_kv_heads * head_dim, bias)
            whole.v_proj = nn.Linear(dims, n_kv_heads * head_dim, bias)
            whole.o_proj = nn.Linear(n_heads * head_dim, dims, bias)
            whole.n_heads, whole.n_kv_heads, whole.rope = n_heads, n_kv_heads, rope
            whole.scale = head_dim**-0.5 if scale is None else scale
            for name, norm in zip(NORMS, (q_norm, k_norm)):
                if norm is not None:
                    setattr(whole, name, norm)
            self._cut("ParallelAttention", whole, sequence_parallel, rank_shares, group)

    @classmethod
    def from_attention(
        cls,
        attention: nn.Module,
        *,
        sequence_parallel: bool = False,
        rank_shares: Sequence[float] | None = None,
        group: GroupLike | None = None,
    ) -> "ParallelAttention":
        """This rank's heads of an ``Attention`` module of mlx-lm that all ranks hold.

        It must compute as Llama's or Qwen3's: q_proj, k_proj, v_proj and o_proj, plain or quantized, rope, scale,
        n_heads and n_kv_heads, and optionally q_norm and k_norm of single heads. Arguments as for the class. Parameters
        that are frozen stay so.

        Raises:
            InvalidArgument: on all ranks, as for the class, if ``attention`` is something else on one of them, or if
                a rank's heads are no whole quantization groups of o_proj.
        """
        group, name = group_of(group), f"{cls.__name__}.from_attention"
        layer = cls.__new__(cls)
        heads = [getattr(attention, key, None) for key in ("n_heads", "n_kv_heads", "scale")]
        with agreed(name, group, sequence_parallel, rank_shares, heads, described(attention)):
            layer._cut(name, attention, sequence_parallel, rank_shares, group)
        return layer

    def to_attention(self, attention: nn.Module) -> nn.Module:
        """Puts the full projections and norms into a module that :meth:`from_attention` takes, and returns it.

        A collective that is carried out at once: all ranks call it. ``attention`` may have any values.

        Raises:
            InvalidArgument: on all ranks, if its heads are others on one of them.
        """
        total, total_kv = sum(self.heads), self._n_kv_heads
        with agreed("ParallelAttention.to_attention", self._group, self._heads, self._kv_heads):
            found = getattr(attention, "n_heads", None), getattr(attention, "n_kv_heads", None)
            if found != (total, total_kv):
                raise InvalidArgument(
                    f"ParallelAttention.to_attention: there are {total} heads and {total_kv} KV heads, but the module "
                    f"has {found[0]} and {found[1]}"
                )
        for name in PROJECTIONS:
            whole = self[name].to_linear()
            if name in ("k_proj", "v_proj"):
                # Where in the ranks' heads, one after the other, each KV head is for the first time.
                held = list(chain(*self.kv_heads))
                whole = _with_heads(whole, [held.index(head) for head in range(total_kv)], self.head_dim)
            setattr(attention, name, whole)
        for name in NORMS:
            if name in self:
                setattr(attention, name, self[name])
        return attention

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> mx.array:
        queries, keys, values = self._project(x)
        batch, length = queries.shape[:2]
        queries = queries.reshape(batch, length, self.n_heads, self.head_dim)
        keys = keys.reshape(batch, length, self.n_kv_heads, self.head_dim)
        values = values.reshape(batch, length, self.n_kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        queries = self._normalized("q_norm", queries).transpose(0, 2, 1, 3)
        keys = self._normalized("k_norm", keys).transpose(0, 2, 1, 3)
        if self.rope is not None:
            offset = 0 if cache is None else cache.offset
            queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        if self._is_mixed and bridge.traces() and not hasattr(cache, "bits"):
            # MLX computes one query head for each KV head in another graph than several, and the order of a graph's
            # collectives must be that of all ranks.
            copies = mx.array([head * self.n_kv_heads // self.n_heads for head in range(self.n_heads)])
            keys, values = mx.take(keys, copies, axis=1), mx.take(values, copies, axis=1)
        attend: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
        if hasattr(cache, "bits"):  # a cache that is quantized: MLX has no attention over it, mlx-lm has
            from mlx_lm.models.base import quantized_scaled_dot_product_attention

            config = {"group_size": cache.group_size, "bits": cache.bits}
            attend = partial(quantized_scaled_dot_product_attention, **config)
        y = attend(queries, keys, values, scale=self.scale, mask=self._mask(mask))
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(batch, length, -1))

    @property
    def heads(self) -> list[int]:
        """How many query heads each rank holds."""
        return list(self._heads)

    @property
    def kv_heads(self) -> list[range]:
        """Which KV heads each rank holds."""
        return list(self._kv_heads)

    @property
    def group(self) -> Group:
        """The ranks that hold the layer."""
        return self._group

    def _cut(
        self, name: str, whole: nn.Module, sequence_parallel: bool, rank_shares: Sequence[float] | None, group: Group
    ) -> None:
        heads, kv_heads, head_dim = heads_of(name, whole, group.size(), rank_shares)
        total_kv = whole.n_kv_heads
        super().__init__()
        self.head_dim, self.scale, self.rope = head_dim, whole.scale, whole.rope
        self.n_heads, self.n_kv_heads = heads[group.rank()], len(kv_heads[group.rank()])
        self._heads, self._kv_heads, self._n_kv_heads, self._group = tuple(heads), tuple(kv_heads), total_kv, group
        self.shares_kv_heads = sum(map(len, kv_heads)) > total_kv
        # Whether some ranks have one query head for each KV head, and others more.
        self._is_mixed = len({size > len(held) for size, held in zip(heads, kv_heads, strict=True)}) > 1
        common = {"sequence_parallel": sequence_parallel, "group": group}
        column = common | {"multiple": head_dim}
        self.q_proj = ColumnParallelLinear.from_linear(whole.q_proj, rank_shares=heads, **column)
        for key in ("k_proj", "v_proj"):
            expanded = _with_heads(whole[key], list(chain(*kv_heads)), head_dim)
            setattr(
                self, key, ColumnParallelLinear.from_linear(expanded, rank_shares=list(map(len, kv_heads)), **column)
            )
        self.o_proj = RowParallelLinear.from_linear(whole.o_proj, rank_shares=heads, multiple=head_dim, **common)
        for key in NORMS:
            if key in whole:
                setattr(self, key, whole[key])

    def _project(self, x: mx.array) -> list[mx.array]:
        layers = [self.q_proj, self.k_proj, self.v_proj]
        if not all(isinstance(layer, ParallelLinear) for layer in layers):
            return [layer(x) for layer in layers]  # with adapters
        x = self.q_proj.enter(x)  # once: one all_sum of its gradient instead of three
        if not self.shares_kv_heads:
            return [layer.product(x) for layer in layers]
        share = self._with_gradients_of_all_holders
        return [self.q_proj.product(x), *(_call(layer, layer.product, share, x) for layer in layers[1:])]

    def _with_gradients_of_all_holders(self, parameter: mx.array) -> mx.array:
        """A parameter of this rank's KV heads itself. Backward: the sum over all ranks that hold the same head."""
        mine = self._kv_heads[self._group.rank()]
        start, stop, end = (head * self.head_dim for head in (mine.start, mine.stop, self._n_kv_heads))
        return copy_to_holders(parameter, [slice(start, stop)], end, 0, self._group)

    def _normalized(self, name: str, x: mx.array) -> mx.array:
        """Applies a norm that all ranks hold, each for its own heads: its gradient is the sum over the ranks."""
        if name not in self:
            return x
        norm = self[name]
        return _call(norm, norm, lambda p: copy_to_tensor_parallel_region(p, group=self._group), x)

    def _mask(self, mask: mx.array | str | None) -> mx.array | str | None:
        """The mask of this rank's heads."""
        if isinstance(mask, mx.array) and mask.ndim >= 3 and mask.shape[-3] > 1:
            return mask[..., shard_slice(self._heads, self._group.rank()), :, :]
        return mask


def _call(module: nn.Module, function: Callable, wrap: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """``function(x)`` with the module's trainable parameters seen through ``wrap``, which gives them their gradient."""
    parameters = module.trainable_parameters()
    try:
        module.update(tree_map(wrap, parameters))
        return function(x)
    finally:
        module.update(parameters)


def head_dim_of(name: str, attention: nn.Module, sizes: Sequence[tuple[int, int]]) -> int:
    """The features of a head of a module whose projections have these sizes, (output_dims, input_dims) of each.

    Raises InvalidArgument, whose text begins with ``name``: the sizes, or those of the norms of queries and keys, are
    not those of the module's numbers of heads.
    """
    q, k, v, o = sizes
    n_heads, n_kv_heads = attention.n_heads, attention.n_kv_heads
    if not (n_heads and n_kv_heads and q[0] % n_heads == 0):
        raise InvalidArgument(f"{name}: q_proj has {q[0]} outputs, which are not {n_heads} heads")
    head_dim = q[0] // n_heads
    if k[0] != n_kv_heads * head_dim or v[0] != k[0] or o[1] != q[0]:
        raise InvalidArgument(
            f"{name}: with {n_heads} heads of {head_dim} features and {n_kv_heads} KV heads k_proj and v_proj must "
            f"have {n_kv_heads * head_dim} outputs and o_proj {q[0]} inputs, not {k[0]}, {v[0]} and {o[1]}"
        )
    for key in NORMS:
        for path, parameter in parameters(attention[key]).items() if key in attention else ():
            if parameter.shape != (head_dim,):
                raise InvalidArgument(
                    f"{name}: {key}.{path} has shape {parameter.shape}, not ({head_dim},): a norm over more than a "
                    "head cannot be sharded with the heads"
                )
    return head_dim


def _with_heads(linear: nn.Module, heads: list[int], head_dim: int) -> nn.Module:
    """The layer with the outputs of these heads; a head may come more than once."""
    if heads == list(range(dims(linear)[0] // head_dim)):
        return linear
    index = mx.array(heads)
    return mapped(linear, lambda _, p: p.reshape(-1, head_dim, *p.shape[1:])[index].reshape(-1, *p.shape[1:]))
