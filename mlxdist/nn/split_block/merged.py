"""Merges linears that read the same input into one matrix, sharded for this rank and laid out for the device.

On the CPU backend a matrix is kept transposed, (in, out): ``x @ w`` then adds up rows, which compilers vectorise, 1.4
to 1.8 times faster from 256 to 14336 columns (one row, float32, MLX's Linux wheels). On a GPU it stays (out, in), as
``nn.Linear`` has it. Quantized matrices have one layout only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layout.partition import scaled, take
from ..tensor_parallel.linear_layers import quantization

__all__ = ["LinearShard", "Matrix", "Spec", "merge", "project"]


class LinearShard(NamedTuple):
    """The shard of one linear that this rank holds: ``axis`` 0 shards outputs, 1 inputs; sizes and rank as in
    `take`."""

    axis: int
    sizes: tuple[int, ...]
    rank: int


class Spec(NamedTuple):
    """How a `Matrix` is applied; hashable. ``quantized``: the items of `quantization`, none where it is not."""

    transposed: bool
    quantized: tuple[tuple[str, Any], ...] = ()
    bias: bool = False


class Matrix(nn.Module):
    """``weight`` (in, out) or (out, in), with ``scales`` and ``biases`` if quantized, and ``bias`` if there is one."""

    def __init__(self, spec: Spec, arrays: dict[str, mx.array]) -> None:
        super().__init__()
        self._spec = spec
        for name, array in arrays.items():
            self[name] = array

    @property
    def spec(self) -> Spec:
        return self._spec


def merge(
    linears: Sequence[nn.Module], shards: Sequence[LinearShard], transposed: bool, keep_bias: bool = True
) -> list[Matrix]:
    """The shards of ``linears`` as one matrix, their outputs one after the other.

    More than one where they are quantized in different ways. ``keep_bias=False`` leaves the biases out: of a linear
    whose inputs are sharded one rank alone adds it. ``linears`` are plain or quantized; for tied heads, embeddings.
    """
    merged: list[Matrix] = []
    pending: list[dict[str, mx.array]] = []
    specs = [_spec(linear, transposed, keep_bias) for linear in linears]
    # One matrix has one form: where a linear has a bias, the others get one of zeros.
    if any(spec.bias for spec in specs):
        specs = [spec._replace(bias=True) for spec in specs]
    for number, (linear, shard, spec) in enumerate(zip(linears, shards, specs)):
        pending.append(_shard_of(linear, shard, spec))
        if number + 1 == len(specs) or specs[number + 1] != spec:
            arrays = {name: mx.concatenate([piece[name] for piece in pending]) for name in pending[0]}
            if spec.transposed:
                arrays["weight"] = mx.contiguous(arrays["weight"].T)
            mx.eval(arrays)  # here, so that the shards go and the full matrices can be freed
            merged.append(Matrix(spec, arrays))
            pending = []
    return merged


def project(specs: Sequence[Spec], matrices: Sequence[dict[str, mx.array]], x: mx.array) -> mx.array:
    """The outputs of all matrices one after the other: (..., out)."""
    outputs = []
    for spec, matrix in zip(specs, matrices):
        if spec.quantized:
            scales, biases, config = matrix["scales"], matrix.get("biases"), dict(spec.quantized)
            y = mx.quantized_matmul(x, matrix["weight"], scales, biases, transpose=True, **config)
        else:
            y = x @ (matrix["weight"] if spec.transposed else matrix["weight"].T)
        outputs.append(y + matrix["bias"] if spec.bias else y)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, -1)


def _spec(linear: nn.Module, transposed: bool, keep_bias: bool) -> Spec:
    config = tuple(quantization(linear).items())
    return Spec(transposed and not config, config, keep_bias and "bias" in linear)


def _shard_of(linear: nn.Module, shard: LinearShard, spec: Spec) -> dict[str, mx.array]:
    arrays = {}
    for name in ("weight", "scales", "biases"):
        if linear.get(name) is not None:
            full = linear[name]
            arrays[name] = take(full, shard.axis, scaled(shard.sizes, full.shape[shard.axis]), shard.rank)
    if spec.bias:
        size = shard.sizes[shard.rank] if shard.axis == 0 else arrays["weight"].shape[0]
        full = linear.get("bias")
        if full is None:
            arrays["bias"] = mx.zeros((size,), arrays.get("scales", arrays["weight"]).dtype)
        else:
            arrays["bias"] = take(full, 0, shard.sizes, shard.rank) if shard.axis == 0 else full
    return arrays
