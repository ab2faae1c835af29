"""The operations in a group of one: they change nothing, and refuse what they would refuse in a larger group."""

import mlx.core as mx
import numpy as np
import pytest

import mlxdist

DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32"]
DTYPES += ["float64", "complex64"]
UNCHANGED = ["all_sum", "all_max", "all_min", "all_reduce", "all_gather", "sum_scatter", "broadcast"]


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_are_copied(name, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    for array in (x, x.T, x[:, ::2], x[0, 0:0], x[1:2, 2].reshape(())):
        result = getattr(mlxdist, name)(array)
        assert result.dtype == array.dtype and result.shape == array.shape
        assert np.array_equal(result, array) and not np.shares_memory(result, array)


@pytest.mark.parametrize("name", UNCHANGED)
def test_mlx_arrays_come_back(name):
    for x in (mx.arange(12.0).reshape(3, 4), mx.array(3), mx.zeros((0, 2)), mx.ones((2,), mx.bfloat16)):
        result = getattr(mlxdist, name)(x)
        assert result.dtype == x.dtype and result.shape == x.shape and mx.array_equal(result, x)


@pytest.mark.parametrize("name", UNCHANGED)
def test_out(name):
    x = np.arange(12.0).reshape(3, 4)
    out = np.zeros((3, 4))
    assert getattr(mlxdist, name)(x, out=out) is out and np.array_equal(out, x)
    assert getattr(mlxdist, name)(x, out=x) is x and np.array_equal(out, x)
    overlapping = np.arange(16.0)
    getattr(mlxdist, name)(overlapping[:12], out=overlapping[4:])
    assert np.array_equal(overlapping[4:], np.arange(12.0))


def test_bits_of_bfloat16():
    bits = np.array(mx.array([1.0, -2.5]).astype(mx.bfloat16).view(mx.uint16))
    for dtype in (mx.bfloat16, "bfloat16", np.uint16, mx.uint16, None):
        assert np.array_equal(mlxdist.all_sum(bits, dtype=dtype), bits)


@pytest.mark.parametrize(
    "x, words",
    [
        (np.array(["a"]), "dtype str32 is not supported; supported are bool, uint8"),
        (np.array([object()]), "dtype object is not supported"),
        (np.zeros(2, np.complex128), "dtype complex128 is not supported"),
        (np.zeros(2, np.longdouble), "is not supported"),
        (np.zeros(2, "datetime64[s]"), "is not supported"),
        (np.zeros(2, [("a", "f4")]), "is not supported"),
        (np.zeros(2, np.dtype("f4").newbyteorder()), "byte order"),
        (np.ma.zeros(3), "masked arrays are not supported"),
        ({1.0, 2.0}, "x must be an mx.array or a numpy.ndarray or another buffer, not set"),
        ([1, [2]], "x makes no mx.array: Initialization encountered extra dimension"),
        (["a"], "x makes no mx.array: Invalid type str"),
        ("text", "not str; np.asarray(x) makes one"),
        (None, "not NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("name", ["all_sum", "all_gather", "sum_scatter", "broadcast"])
def test_input_is_rejected(name, x, words):
    with pytest.raises(mlxdist.InvalidArgument) as refused:
        getattr(mlxdist, name)(x)
    assert words in str(refused.value) and str(refused.value).startswith(name)


@pytest.mark.parametrize("x", [3, 2.5, [1, 2], [[1.0, 2.0], [3.0, 4.0]], (1, 2), [], [mx.array(1.0), mx.array(2.0)]])
@pytest.mark.parametrize("name", ["all_sum", "all_gather", "all_max"])
def test_numbers_and_lists_are_what_mlx_makes_of_them(name, x):
    result = getattr(mlxdist, name)(x)
    assert result.dtype == mx.array(x).dtype and result.tolist() == mx.array(x).tolist()


def read_only() -> np.ndarray:
    array = np.zeros((2, 3))
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "out, words",
    [
        (np.zeros((3, 2)), "out must have shape (2, 3) and dtype float64, not (3, 2)"),
        (np.zeros((2, 3), np.float32), "not (2, 3) and float32"),
        (np.zeros((3, 2)).T, "out must be contiguous"),
        (np.zeros((2, 6))[:, ::2], "out must be contiguous"),
        (read_only(), "out is read-only"),
        ([[0.0] * 3] * 2, "out must be a numpy.ndarray or another writable buffer, not list"),
        (mx.zeros((2, 3)), "out must be a numpy.ndarray or another writable buffer, not an mx.array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("name", UNCHANGED)
def test_out_is_rejected(name, out, words):
    x = np.ones((2, 3))
    with pytest.raises(mlxdist.InvalidArgument) as refused:
        getattr(mlxdist, name)(x, out=out)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: mlxdist.all_reduce(np.ones(2), "avg"), "op must be 'sum', 'max', 'min' or 'prod', not 'avg'"),
        (lambda: mlxdist.all_sum(np.ones(2), stream=mx.cpu), "stream is for mx.array"),
        (lambda: mlxdist.all_sum(mx.ones(2), out=np.ones(2)), "out and dtype are for NumPy arrays"),
        (lambda: mlxdist.all_sum(mx.ones(2), dtype=mx.float32), "out and dtype are for NumPy arrays"),
        (lambda: mlxdist.all_sum(np.ones(2), dtype=mx.bfloat16), "dtype=bfloat16 does not fit an array of float64"),
        (lambda: mlxdist.all_sum(np.ones(2, np.uint16), dtype=mx.float16), "does not fit an array of uint16"),
        (
            lambda: mlxdist.all_sum(np.ones(2), group=mlxdist.init().mlx),
            "must be what mlxdist.init() or Group.split() returned",
        ),
        (lambda: mlxdist.broadcast(np.ones(2), 1), "root is 1, but the ranks are 0 to 0"),
        (lambda: mlxdist.broadcast(mx.ones(2), -1), "root is -1"),
        (lambda: mlxdist.send(np.ones(2), 0), "needs a peer, but the group has one rank"),
        (lambda: mlxdist.send(mx.ones(2), 1), "needs a peer, but the group has one rank"),
        (lambda: mlxdist.recv((2,), mx.float32, 1), "needs a peer, but the group has one rank"),
        (lambda: mlxdist.recv_like(np.ones(2), 1), "needs a peer, but the group has one rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_argument_is_rejected(call, words):
    with pytest.raises(mlxdist.InvalidArgument) as refused:
        call()
    assert words in str(refused.value)
