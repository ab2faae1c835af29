"""One matrix of several: linears that read the same input, cut for this rank, merged and laid out for the device.

Layout. On the CPU backend a matrix is kept transposed, (in, out): ``x @ w`` then adds up rows, which compilers
vectorise, where ``x @ w.T`` forms one dot product after the other. Measured with the BLAS of MLX's Linux wheels (the
reference implementation), one row and float32: 1.4 to 1.8 times faster from 256 to 14336 columns. On a GPU it stays
(out, in), as ``nn.Linear`` has it. Quantized matrices have one layout only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument

from ..partition import take

__all__ = ["Cut", "Matrix", "Spec", "granularity", "merge", "project", "require_linear"]


class Cut(NamedTuple):
    """The part of one linear that this rank holds: ``axis`` 0 cuts outputs, 1 inputs; sizes and rank as in `take`."""

    axis: int
    sizes: tuple[int, ...]
    rank: int


class Spec(NamedTuple):
    """How a `Matrix` is applied; hashable. ``bits`` is None where it is not quantized."""

    transposed: bool
    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
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


def granularity(linear: nn.Module, axis: int) -> int:
    """Inputs (axis 1) of a quantized linear are cut in whole groups, which are also whole words."""
    if axis == 0 or not _is_quantized(linear):
        return 1
    return lcm(linear.group_size, 32)


def merge(linears: Sequence[nn.Module], cuts: Sequence[Cut], transposed: bool, keep_bias: bool = True) -> list[Matrix]:
    """The parts of ``linears`` as one matrix, their outputs one after the other.

    More than one where they are quantized in different ways. ``keep_bias=False`` leaves the biases out: of a linear
    whose inputs are cut one rank alone adds it.

    Raises:
        InvalidArgument: a module that is neither Linear nor QuantizedLinear.
    """
    merged: list[Matrix] = []
    pending: list[dict[str, mx.array]] = []
    specs = [_spec(linear, transposed, keep_bias) for linear in linears]
    if any(spec.bias for spec in specs):
        specs = [spec._replace(bias=True) for spec in specs]
    for number, (linear, cut, spec) in enumerate(zip(linears, cuts, specs)):
        pending.append(_part(linear, cut, spec))
        if number + 1 == len(specs) or specs[number + 1] != spec:
            arrays = {name: mx.concatenate([part[name] for part in pending]) for name in pending[0]}
            if spec.transposed:
                arrays["weight"] = mx.contiguous(arrays["weight"].T)
            mx.eval(arrays)  # here, so that the parts go and the whole matrices can be freed
            merged.append(Matrix(spec, arrays))
            pending = []
    return merged


def project(specs: Sequence[Spec], matrices: Sequence[dict[str, mx.array]], x: mx.array) -> mx.array:
    """The outputs of all matrices one after the other: (..., out)."""
    outputs = []
    for spec, matrix in zip(specs, matrices):
        if spec.bits is not None:
            y = mx.quantized_matmul(
                x,
                matrix["weight"],
                matrix["scales"],
                matrix.get("biases"),
                transpose=True,
                group_size=spec.group_size,
                bits=spec.bits,
                mode=spec.mode,
            )
        else:
            y = x @ (matrix["weight"] if spec.transposed else matrix["weight"].T)
        outputs.append(y + matrix["bias"] if spec.bias else y)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, -1)


def _is_quantized(linear: nn.Module) -> bool:
    return isinstance(linear, nn.QuantizedLinear)


def require_linear(linear: nn.Module) -> None:
    """Raises InvalidArgument for a module that `merge` does not take."""
    if type(linear) is not nn.Linear and not _is_quantized(linear):
        raise InvalidArgument(
            f"SplitBlock: cannot merge a {type(linear).__name__}; it takes nn.Linear and nn.QuantizedLinear as they "
            "are before sharding (fuse adapters first)"
        )


def _spec(linear: nn.Module, transposed: bool, keep_bias: bool) -> Spec:
    require_linear(linear)
    bias = keep_bias and "bias" in linear
    if _is_quantized(linear):
        return Spec(False, linear.bits, linear.group_size, getattr(linear, "mode", "affine"), bias)
    return Spec(transposed, bias=bias)


def _part(linear: nn.Module, cut: Cut, spec: Spec) -> dict[str, mx.array]:
    arrays = {}
    for name in ("weight", "scales", "biases"):
        if linear.get(name) is not None:
            whole = linear[name]
            # Quantized inputs are packed into words and share scales, so each array has a length of its own.
            sizes = [size * whole.shape[cut.axis] // sum(cut.sizes) for size in cut.sizes]
            arrays[name] = take(whole, cut.axis, sizes, cut.rank)
    if spec.bias:
        size = cut.sizes[cut.rank] if cut.axis == 0 else arrays["weight"].shape[0]
        whole = linear.get("bias")
        if whole is None:
            arrays["bias"] = mx.zeros((size,), arrays.get("scales", arrays["weight"]).dtype)
        else:
            arrays["bias"] = take(whole, 0, cut.sizes, cut.rank) if cut.axis == 0 else whole
    return arrays
