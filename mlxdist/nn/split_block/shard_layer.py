"""A decoder layer of mlx-lm read for one rank: what the segments of a `SplitBlock` compute with.

The layer is full, and the rank takes its shards; or `shard_model` has sharded it, and what it holds is this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group

from ..layout.partition import split_sizes
from ..tensor_parallel.linear_layers import (
    COLUMN_SHARDED,
    ROW_SHARDED,
    check_linear,
    check_others,
    check_parts,
    dims,
    quantization_unit,
)
from ..tensor_parallel.parallel_attention import NORMS, PROJECTIONS, head_dim_of, heads_of
from .merged import LinearShard, Spec, linear_of, merge

__all__ = ["Shape", "group_of_layer", "shard_of_layer", "require_shardable"]


_MLP = ("gate_proj", "up_proj", "down_proj")


class Shape(NamedTuple):
    """All that a layer's segments depend on besides their arrays; layers with the same share them."""

    heads: int  # of this rank
    kv_heads: int
    head_dim: int
    scale: float
    eps: tuple[float, ...]  # of the two norms, and of those of queries and keys
    qkv: tuple[Spec, ...]
    output: tuple[Spec, ...]
    gate_up: tuple[Spec, ...]
    down: tuple[Spec, ...]
    rotated: int = 0  # dimensions of a head that are rotated, as the block's table says
    traditional: bool = False


class Part(NamedTuple):
    """A rank's part of a layer: its heads, and where its shards of the matrices lie; None: a matrix is the shard."""

    heads: int
    kv_heads: int
    head_dim: int
    query: LinearShard | None = None
    key: LinearShard | None = None
    inner: LinearShard | None = None  # outputs of gate and up, inputs of down


def shard_of_layer(
    layer: nn.Module, rank: int, ranks: int, rank_shares: Sequence[float] | None, transposed: bool
) -> tuple[Shape, dict[str, Any]]:
    """The layer's `Shape`, as far as it determines it, and this rank's parameters, evaluated.

    Raises:
        InvalidArgument: the layer has another shape than `SplitBlock.from_layer` says, or cannot be sharded like this.
    """
    part = _part(layer, rank, ranks, rank_shares)
    attention, mlp = layer.self_attn, layer.mlp
    once = rank == 0  # of a linear whose inputs are sharded one rank adds the bias
    rows = part.inner and part.inner._replace(axis=1)
    matrices = {
        "qkv": merge([attention[name] for name in PROJECTIONS[:3]], [part.query, part.key, part.key], transposed),
        "output": merge([attention.o_proj], [part.query and part.query._replace(axis=1)], transposed, keep_bias=once),
        "gate_up": merge([mlp.gate_proj, mlp.up_proj], [part.inner, part.inner], transposed),
        "down": merge([mlp.down_proj], [rows], transposed, keep_bias=once),
    }
    norms, eps = _merged_norms(layer, part)
    specs: dict[str, Any] = {name: tuple(matrix.spec for matrix in merged) for name, merged in matrices.items()}
    shape = Shape(part.heads, part.kv_heads, part.head_dim, float(attention.scale), eps, **specs)
    return shape, {**norms, **matrices}


def require_shardable(layer: nn.Module, ranks: int, rank_shares: Sequence[float] | None) -> None:
    """Raises InvalidArgument where `shard_of_layer` would, and evaluates nothing."""
    _part(layer, 0, ranks, rank_shares)


def group_of_layer(layer: nn.Module) -> Group | None:
    """The ranks over which `shard_model` has sharded a layer's attention and MLP; ``None``: it is full."""
    blocks = [block for name in ("self_attn", "mlp") if isinstance(block := layer.get(name), nn.Module)]
    regions = [vars(block).get("_region") for block in blocks]
    return next((region.group for region in regions if region is not None), None)


def _part(layer: nn.Module, rank: int, ranks: int, rank_shares: Sequence[float] | None) -> Part:
    """This rank's part, once it is certain that the layer is one that a block can stand for."""
    attention, mlp = _require_parts(layer)
    _norms(layer)
    if group_of_layer(layer) is not None:
        return _held_part(attention, mlp, COLUMN_SHARDED, ROW_SHARDED)
    if ranks == 1:
        return _held_part(attention, mlp)
    query, key, key_rank, dim = _head_shards(attention, rank, ranks, rank_shares)
    check_parts("SplitBlock", mlp, _MLP)
    width, multiple = mlp.gate_proj.weight.shape[0], quantization_unit(mlp.down_proj)
    inner = split_sizes("SplitBlock: intermediate size of the MLP", width, ranks, rank_shares, multiple)
    return Part(
        query[rank],
        key[key_rank],
        dim,
        LinearShard(0, tuple(count * dim for count in query), rank),
        LinearShard(0, tuple(count * dim for count in key), key_rank),
        LinearShard(0, tuple(inner), rank),
    )


def _held_part(
    attention: nn.Module, mlp: nn.Module, columns: tuple[type, ...] = (), rows: tuple[type, ...] = ()
) -> Part:
    """The part that a layer's matrices are, with or without adapters on them. ``columns``, ``rows``: the classes of
    those whose outputs and inputs are sharded; none for a layer that is full."""
    check_others("SplitBlock", attention, (*PROJECTIONS, *NORMS, "rope"))
    check_others("SplitBlock", mlp, _MLP)
    for module, names, kinds in (
        (attention, PROJECTIONS[:3], columns),
        (attention, PROJECTIONS[3:], rows),
        (mlp, _MLP[:2], columns),
        (mlp, _MLP[2:], rows),
    ):
        for name in names:
            _check_held(name, linear_of(module[name]), kinds)
        if getattr(vars(module).get("_region"), "scaled", None):
            raise InvalidArgument(
                f"SplitBlock: ranks multiply parameters of {type(module).__name__} before they add up"
            )
    head_dim = head_dim_of("SplitBlock", attention, [dims(linear_of(attention[name])) for name in PROJECTIONS])
    (gate, _), (up, _), (_, down) = (dims(linear_of(mlp[name])) for name in _MLP)
    if not gate == up == down:
        raise InvalidArgument(f"SplitBlock: an MLP of {gate}, {up} and {down} features is not Llama's")
    return Part(attention.n_heads, attention.n_kv_heads, head_dim)


def _check_held(name: str, linear: nn.Module, kinds: tuple[type, ...]) -> None:
    if type(linear).__name__ == "MultiLoRALinear":
        raise InvalidArgument(f"SplitBlock: {name} has adapters of which each row of a batch has its own")
    if not kinds:
        check_linear(f"SplitBlock: {name}", linear)
    elif not isinstance(linear, kinds):
        raise InvalidArgument(f"SplitBlock: {name} is a {type(linear).__name__}, which is not sharded as in Llama")


def _require_parts(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    name = type(layer).__name__
    wanted = {
        "": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        "self_attn.": (*PROJECTIONS, "rope", "n_heads", "n_kv_heads", "scale"),
        "mlp.": _MLP,
    }
    missing = []
    for prefix, names in wanted.items():
        module = getattr(layer, prefix[:-1], None) if prefix else layer
        missing += [prefix + attribute for attribute in names if module is not None and not hasattr(module, attribute)]
    if missing:
        raise InvalidArgument(
            f"SplitBlock: {name} has no {', '.join(missing)}: it is not shaped like a decoder layer of Llama or Qwen3"
        )
    return layer.self_attn, layer.mlp


def _head_shards(
    attention: nn.Module, rank: int, ranks: int, rank_shares: Sequence[float] | None
) -> tuple[list[int], list[int], int, int]:
    """The query heads of each rank; the KV heads of each shard of these, and which of the shards this rank has: where
    there are fewer than ranks, ranks next to each other hold the same one; the features of a head."""
    query, held, dim = heads_of("SplitBlock", attention, ranks, rank_shares)
    shards = list(dict.fromkeys(held))
    if sum(map(len, shards)) != attention.n_kv_heads:
        raise InvalidArgument(
            f"SplitBlock: KV heads: {attention.n_kv_heads} can be neither split over {ranks} ranks nor each given to "
            "some of them; choose a number of ranks that is a multiple or a divisor of it"
        )
    return query, [len(shard) for shard in shards], shards.index(held[rank]), dim


def _norms(layer: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The norms of the layer, and those of queries and keys, if there are."""
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    attention = layer.self_attn
    of_heads = [attention[name] for name in NORMS if name in attention]
    for norm in norms + of_heads:
        if type(norm) is not nn.RMSNorm:
            raise InvalidArgument(f"SplitBlock: {type(norm).__name__} of {type(norm).__module__} is not nn.RMSNorm")
    if len(of_heads) == 1 or len({norm.eps for norm in of_heads}) > 1:
        raise InvalidArgument("SplitBlock: q_norm and k_norm must both be there, and have the same eps")
    return norms, of_heads


def _merged_norms(layer: nn.Module, part: Part) -> tuple[dict[str, mx.array], tuple[float, ...]]:
    """This rank's norms, those of queries and keys as one: a row for each head."""
    norms, of_heads = _norms(layer)
    arrays = {"input_norm": norms[0].weight, "post_norm": norms[1].weight}
    if of_heads:
        counts = part.heads, part.kv_heads
        rows = [mx.broadcast_to(norm.weight, (count, part.head_dim)) for norm, count in zip(of_heads, counts)]
        arrays["qk_norm"] = mx.concatenate(rows)
    mx.eval(arrays)
    return arrays, tuple(float(norm.eps) for norm in norms + of_heads[:1])
