"""Rounding to 16 bits at random, up or down, so that the mean is the number itself.

Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551.
"""

import mlx.core as mx

__all__ = ["round_stochastically"]

# The bits of a float32 that the dtype has not.
_LOST_BITS = {mx.bfloat16: 16, mx.float16: 13}
_SMALLEST_NORMAL, _SUBNORMAL_STEP = 2.0**-14, 2.0**-24  # of float16; those of bfloat16 are those of float32


def round_stochastically(x: mx.array, dtype: mx.Dtype, key: mx.array) -> mx.array:
    """``x``, float32 of any shape, as bfloat16 or float16: one of the two next numbers, the nearer one more often.

    Numbers that the dtype has, infinities and NaN stay. ``key``: of ``mx.random``, as from ``mx.random.split``.
    """
    lost = _LOST_BITS[dtype]
    random = mx.random.randint(0, 2**24, x.shape, mx.uint32, key=key)  # of 24 bits
    # A carry goes into the exponent, as it should.
    bits = (x.view(mx.uint32) + (random >> (24 - lost))) & (0xFFFFFFFF << lost & 0xFFFFFFFF)
    rounded = bits.view(mx.float32)
    if dtype == mx.float16:
        steps = mx.floor(x / _SUBNORMAL_STEP + random * 2.0**-24)
        rounded = mx.where(mx.abs(x) < _SMALLEST_NORMAL, steps * _SUBNORMAL_STEP, rounded)
    return mx.where(mx.isfinite(x), rounded, x).astype(dtype)
