"""E4M3 on the wire: all codes, rounding, special values, and the bound of the error that the module states."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import mlxdist
from mlxdist.nn.expert_parallel.fp8 import dequantize_e4m3, pack_e4m3, quantize_e4m3, unpack_e4m3

# And half a step of what they have: of normal numbers, as a share of them, and of subnormal ones.
DTYPES = {mx.float32: (0.0, 0.0), mx.float16: (2.0**-11, 2.0**-25), mx.bfloat16: (2.0**-8, 2.0**-134)}


def value_of(code: int) -> float:
    """What the paper says of a code: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


VALUES = np.array([value_of(code) for code in range(256)], np.float64)
POSITIVE = VALUES[:127]  # in order, 0 to 448


def nearest(x: np.ndarray) -> np.ndarray:
    """The codes of numbers of at most 448: nearest, ties to the even code. By search, in float64."""
    magnitude = np.abs(x.astype(np.float64))
    above = np.searchsorted(POSITIVE, magnitude).clip(1, 126)
    low, high = POSITIVE[above - 1], POSITIVE[above]
    up = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    return np.where(up, above, above - 1).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


def scale_one(values: np.ndarray) -> np.ndarray:
    """Codes of numbers whose token has scale 1, because 448 comes first."""
    token = mx.array(np.concatenate([[448.0], values]).astype(np.float32))
    codes, scale = quantize_e4m3(token)
    assert scale.item() == 1
    return np.array(codes)[1:]


def test_every_code_means_what_the_paper_says_and_comes_back():
    decoded = np.array(dequantize_e4m3(mx.arange(256).astype(mx.uint8), mx.ones((1,))))
    np.testing.assert_array_equal(decoded, VALUES.astype(np.float32))
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    np.testing.assert_array_equal(scale_one(VALUES[numbers]), numbers)


def test_rounds_to_nearest_and_ties_to_even():
    """The middle between every two neighbours, the float32 numbers on both sides of it, and many others."""
    middles = ((POSITIVE[1:] + POSITIVE[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (0, 448)]
    spread = np.exp2(np.random.default_rng(0).uniform(-14, 8.8, 20000)).astype(np.float32)
    values = np.concatenate([middles, *beside, spread])
    values = np.concatenate([values, -values])
    np.testing.assert_array_equal(scale_one(values), nearest(values))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype):
    inf, nan = float("inf"), float("nan")
    x = mx.array([[0.0, -0.0, 0.0], [inf, 1.0, -3.0], [nan, -inf, -2.0], [nan, inf, nan]]).astype(dtype)
    expected = np.array([[0, -0.0, 0], [nan, 1, -3], [nan, nan, -2], [nan, nan, nan]], np.float32)
    back = np.array(unpack_e4m3(pack_e4m3(x), dtype).astype(mx.float32))
    np.testing.assert_allclose(back, expected, rtol=2.0**-4)
    np.testing.assert_array_equal(np.signbit(back[0]), [False, True, False])


def test_the_largest_element_comes_back_and_nothing_overflows():
    info = np.finfo(np.float32)
    rng = np.random.default_rng(1)
    largest = np.concatenate([[info.max, np.nextafter(info.max, 0), info.tiny * 1024], rng.uniform(0, info.max, 500)])
    x = mx.array(largest.astype(np.float32))[:, None]
    np.testing.assert_allclose(np.array(unpack_e4m3(pack_e4m3(x))), np.array(x), rtol=2.0**-22)
    half = mx.array([[65504.0], [65472.0]], dtype=mx.float16)
    assert mx.array_equal(unpack_e4m3(pack_e4m3(half), mx.float16), half)


@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=3, max_side=9),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
    ),
    st.sampled_from(list(DTYPES)),
)
@example(np.array([2.0**-149, 2.0**-126], np.float32), mx.float32)
@example(np.array([448 * 2.0**-120, 2.0**-130], np.float32), mx.float32)
def test_the_error_is_within_the_bound(values, dtype):
    limit = {mx.float32: np.finfo(np.float32).max, mx.float16: 65504, mx.bfloat16: 3.38e38}[dtype]
    x = mx.array(values.clip(-limit, limit)).astype(dtype)
    within_the_bound(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_holds_in_the_middle_between_codes(dtype):
    """Where rounding is off by half a step, of large tokens and of those whose scale is nearly subnormal."""
    random = np.random.default_rng(3)
    for exponent in range(-126, -110) if dtype != mx.float16 else range(-22, 7):
        largest = (448 * 2.0**exponent * random.uniform(1, 2, (500, 1))).astype(np.float32)
        middles = (POSITIVE[:32] + POSITIVE[1:33]) / 2 * (largest.astype(np.float64) / 448)
        near = [middles.astype(np.float32)]
        near += [np.nextafter(near[0], np.float32(side)) for side in (0, 1)]
        within_the_bound(mx.array(np.concatenate([largest, *near], axis=1)).astype(dtype))


def within_the_bound(x: mx.array) -> None:
    """Of the module's documentation."""
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    scale = np.maximum(np.abs(exact).max(axis=-1, keepdims=True) / 448, 2.0**-126)
    back = np.array(unpack_e4m3(pack_e4m3(x), x.dtype).astype(mx.float32)).astype(np.float64)
    bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * scale) * (1 + 2.0**-18) + 2.0**-150
    normal, subnormal = DTYPES[x.dtype]
    assert (np.abs(back - exact) <= bound + normal * np.abs(back) + subnormal).all()


def test_one_array_per_token_of_codes_and_scale():
    x = mx.random.normal((3, 5, 7))
    wire = pack_e4m3(x)
    codes, scale = quantize_e4m3(x)
    assert (wire.dtype, wire.shape) == (mx.uint8, (3, 5, 11))
    np.testing.assert_array_equal(np.array(wire)[..., :7], np.array(codes))
    np.testing.assert_array_equal(np.ascontiguousarray(np.array(wire)[..., 7:]).view(np.float32), np.array(scale))
    for shape in ((0, 5), (4, 0), (2, 0, 3)):
        assert unpack_e4m3(pack_e4m3(mx.zeros(shape))).shape == shape


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_compiled_is_bitwise_the_same(dtype):
    x = (mx.random.normal((6, 33)) * mx.exp(mx.random.normal((6, 1)) * 5)).astype(dtype)
    assert mx.array_equal(mx.compile(pack_e4m3)(x), pack_e4m3(x))
    compiled = mx.compile(lambda wire: unpack_e4m3(wire, dtype))
    assert mx.array_equal(compiled(pack_e4m3(x)), unpack_e4m3(pack_e4m3(x), dtype))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: pack_e4m3(mx.ones((2, 3), mx.int32)), "not int32 of shape (2, 3); cast them first"),
        (lambda: quantize_e4m3(mx.array(1.0)), "not float32 of shape ()"),
        (lambda: unpack_e4m3(mx.ones((2, 3), mx.uint8)), "not uint8 of shape (2, 3)"),
        (lambda: unpack_e4m3(mx.ones((2, 8))), "not float32 of shape (2, 8)"),
    ],
)
def test_rejected(call, words):
    with pytest.raises(mlxdist.InvalidArgument) as raised:
        call()
    assert words in str(raised.value)
