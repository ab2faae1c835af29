"""A decoder layer of mlx-lm read and sharded for one rank: what the segments of a `SplitBlock` compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument

from ..layout.partition import split_sizes
from ..tensor_parallel.linear_layers import check_parts, quantization_unit
from ..tensor_parallel.parallel_attention import heads_of
from .merged import LinearShard, Spec, merge

__all__ = ["Shape", "require_shardable", "shard_layer"]


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


class Heads(NamedTuple):
    """The heads of each rank. Where there are fewer KV heads than ranks, ranks next to each other hold the same one."""

    query: list[int]
    key: list[int]
    key_rank: int  # whose shard of the keys and values this rank holds
    dim: int


def shard_layer(
    layer: nn.Module, rank: int, ranks: int, rank_shares: Sequence[float] | None, transposed: bool
) -> tuple[Shape, dict[str, Any]]:
    """The layer's `Shape`, as far as it determines it, and this rank's parameters, evaluated.

    Raises:
        InvalidArgument: the layer has another shape than `SplitBlock.from_layer` says, or cannot be sharded like this.
    """
    heads, inner = _shards(layer, rank, ranks, rank_shares)
    attention, mlp = layer.self_attn, layer.mlp
    query = LinearShard(0, tuple(count * heads.dim for count in heads.query), rank)
    key = LinearShard(0, tuple(count * heads.dim for count in heads.key), heads.key_rank)
    columns, rows = LinearShard(0, tuple(inner), rank), LinearShard(1, tuple(inner), rank)
    once = rank == 0  # of a linear whose inputs are sharded one rank adds the bias
    matrices = {
        "qkv": merge([attention.q_proj, attention.k_proj, attention.v_proj], [query, key, key], transposed),
        "output": merge([attention.o_proj], [query._replace(axis=1)], transposed, keep_bias=once),
        "gate_up": merge([mlp.gate_proj, mlp.up_proj], [columns, columns], transposed),
        "down": merge([mlp.down_proj], [rows], transposed, keep_bias=once),
    }
    norms, eps = _merged_norms(layer, heads, rank)
    specs: dict[str, Any] = {name: tuple(matrix.spec for matrix in merged) for name, merged in matrices.items()}
    shape = Shape(heads.query[rank], heads.key[heads.key_rank], heads.dim, float(attention.scale), eps, **specs)
    return shape, {**norms, **matrices}


def require_shardable(layer: nn.Module, ranks: int, rank_shares: Sequence[float] | None) -> None:
    """Raises InvalidArgument where `shard_layer` would, and evaluates nothing."""
    _shards(layer, 0, ranks, rank_shares)


def _shards(layer: nn.Module, rank: int, ranks: int, rank_shares: Sequence[float] | None) -> tuple[Heads, list[int]]:
    """How heads and the MLP's inner width are sharded, once it is certain that the layer is one that can be."""
    attention, mlp = _require_parts(layer)
    heads = _head_shards(attention, rank, ranks, rank_shares)
    check_parts("SplitBlock", mlp, _MLP)
    width, multiple = mlp.gate_proj.weight.shape[0], quantization_unit(mlp.down_proj)
    inner = split_sizes("SplitBlock: intermediate size of the MLP", width, ranks, rank_shares, multiple)
    _norms(layer)
    return heads, inner


def _require_parts(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    name = type(layer).__name__
    wanted = {
        "": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj", "rope", "n_heads", "n_kv_heads", "scale"),
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


def _head_shards(attention: nn.Module, rank: int, ranks: int, rank_shares: Sequence[float] | None) -> Heads:
    query, held, dim = heads_of("SplitBlock", attention, ranks, rank_shares)
    shards = list(dict.fromkeys(held))
    if sum(map(len, shards)) != attention.n_kv_heads:
        raise InvalidArgument(
            f"SplitBlock: KV heads: {attention.n_kv_heads} can be neither split over {ranks} ranks nor each given to "
            "some of them; choose a number of ranks that is a multiple or a divisor of it"
        )
    return Heads(query, [len(shard) for shard in shards], shards.index(held[rank]), dim)


def _norms(layer: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The norms of the layer, and those of queries and keys, if there are."""
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    attention = layer.self_attn
    of_heads = [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    for norm in norms + of_heads:
        if type(norm) is not nn.RMSNorm:
            raise InvalidArgument(f"SplitBlock: {type(norm).__name__} of {type(norm).__module__} is not nn.RMSNorm")
    if len(of_heads) == 1 or len({norm.eps for norm in of_heads}) > 1:
        raise InvalidArgument("SplitBlock: q_norm and k_norm must both be there, and have the same eps")
    return norms, of_heads


def _merged_norms(layer: nn.Module, heads: Heads, rank: int) -> tuple[dict[str, mx.array], tuple[float, ...]]:
    """This rank's norms, those of queries and keys as one: a row for each head."""
    norms, of_heads = _norms(layer)
    arrays = {"input_norm": norms[0].weight, "post_norm": norms[1].weight}
    if of_heads:
        counts = heads.query[rank], heads.key[heads.key_rank]
        rows = [mx.broadcast_to(norm.weight, (count, heads.dim)) for norm, count in zip(of_heads, counts)]
        arrays["qk_norm"] = mx.concatenate(rows)
    mx.eval(arrays)
    return arrays, tuple(float(norm.eps) for norm in norms + of_heads[:1])
