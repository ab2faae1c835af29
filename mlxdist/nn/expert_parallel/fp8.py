"""Tokens in 8 bits on the wire: E4M3 with one float32 scale per token.

E4M3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433) has a sign, 4 bits of exponent and 3
of mantissa: normal numbers from 2^-6 to 448, subnormal ones in steps of 2^-9, NaN (0x7f, 0xff) and no infinity. A token
of D elements is D codes and the 4 bytes of its scale, in one array of uint8:

    [D codes][4 bytes of scale]        scale = max|x| / 448, so the largest element becomes 448

Error. Let s be the token's scale and y what comes back; codes are rounded to nearest, ties to even:

    |y - x| <= max(2^-4 |x|, 2^-10 s) (1 + 2^-18) + 2^-150 + r        2^-10 s = 2.2e-6 max|x|

The factor is for the float32 arithmetic, 2^-150 half a step of subnormal float32; a GPU that takes such numbers for
zeros adds 2^-125. r is the second rounding, of a result of 16 bits: 2^-11 |y| + 2^-25 for float16, 2^-8 |y| + 2^-134
for bfloat16. Elements below s 2^-10 = max|x| / 458752 come back as 0.

A token of zeros comes back as zeros, with their signs. NaN and infinities come back as NaN and do not disturb the other
elements: the scale is that of the finite ones. It is at least 2^-126, the smallest normal float32.

All functions are lazy and work inside ``mx.compile``. Rounding has no useful derivative. So an exchange of tokens in 8
bits has the gradient of an exchange that rounds nothing (Bengio et al. 2013, arXiv:1308.3432).
"""

from collections.abc import Callable

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument

__all__ = [
    "LARGEST",
    "SCALE_BYTES",
    "ExchangeDtype",
    "dequantize_e4m3",
    "dtype_name",
    "pack_e4m3",
    "quantize_e4m3",
    "through",
    "through_e4m3",
    "unpack_e4m3",
]

ExchangeDtype = mx.Dtype | str | None  # what rows travel as: their own dtype, another one, or "fp8"

LARGEST = 448.0  # of E4M3
SCALE_BYTES = 4
_SMALLEST_SCALE = 2.0**-126
_NAN = 0x7F
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def quantize_e4m3(x: mx.array) -> tuple[mx.array, mx.array]:
    """Rounds tokens (..., D), float32, float16 or bfloat16, to E4M3; other dtypes raise InvalidArgument.

    Returns the codes, uint8 of shape (..., D), and the scales, float32 of shape (..., 1): x is about scale * code.
    """
    if x.dtype not in _DTYPES or x.ndim == 0:
        raise InvalidArgument(
            "quantize_e4m3: tokens are float32, float16 or bfloat16 of shape (..., D), not "
            f"{dtype_name(x.dtype)} of shape {x.shape}; cast them first"
        )
    x = x.astype(mx.float32)
    finite = mx.isfinite(x)
    if x.shape[-1] == 0:
        largest = mx.zeros((*x.shape[:-1], 1))
    else:
        largest = mx.where(finite, mx.abs(x), 0).max(axis=-1, keepdims=True)
    scale = mx.maximum(largest / LARGEST, _SMALLEST_SCALE)
    # MLX's to_fp8 makes the largest number of a NaN and of an infinity.
    return mx.where(finite, mx.to_fp8(x / scale), mx.array(_NAN, mx.uint8)), scale


def dequantize_e4m3(codes: mx.array, scale: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The tokens in ``dtype``, from what `quantize_e4m3` returned."""
    # MLX's from_fp8 reads 0x7f and 0xff as NaN. In float32, and rounded once: 448 * scale is no more than max|x|
    # rounded up by half a step of float32, so nothing overflows that did not before.
    return (mx.from_fp8(codes, mx.float32) * scale).astype(dtype)


def pack_e4m3(x: mx.array) -> mx.array:
    """Tokens as they travel: (..., D) of a float dtype as uint8 of shape (..., D + 4). Raises as `quantize_e4m3`."""
    codes, scale = quantize_e4m3(x)
    return mx.concatenate([codes, scale.view(mx.uint8)], axis=-1)


def unpack_e4m3(wire: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The tokens (..., D) in ``dtype``, from uint8 of shape (..., D + 4); InvalidArgument for anything else."""
    if wire.dtype != mx.uint8 or wire.ndim == 0 or wire.shape[-1] < SCALE_BYTES:
        raise InvalidArgument(
            f"unpack_e4m3: tokens on the wire are uint8 of shape (..., D + {SCALE_BYTES}), not "
            f"{dtype_name(wire.dtype)} of shape {wire.shape}"
        )
    codes, scale = wire[..., :-SCALE_BYTES], wire[..., -SCALE_BYTES:]
    return dequantize_e4m3(codes, mx.contiguous(scale).view(mx.float32), dtype)


def through(dtype: ExchangeDtype, collective: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """A collective on ``x`` as it travels, with the result in the dtype of ``x``. Sums and gradients have no 8 bits."""
    if not isinstance(dtype, mx.Dtype):
        return collective(x)
    return collective(x.astype(dtype)).astype(x.dtype)


def through_e4m3(dtype: ExchangeDtype, collective: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """:func:`through`, of a collective that copies rows: those also travel in 8 bits."""
    if dtype == "fp8":
        return unpack_e4m3(collective(pack_e4m3(x)), x.dtype)
    return through(dtype, collective, x)


def dtype_name(dtype: object) -> str:
    """``float32`` and the like."""
    return str(dtype).removeprefix("mlx.core.")
