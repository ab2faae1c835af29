"""The operations on memory that is there: NumPy arrays of every shape, and whatever else has the buffer protocol."""

import array
import ctypes
import mmap

import mlx.core as mx
import numpy as np
import pytest

import mlxdist

FLOATS = np.arange(6, dtype=np.float32)
# What is accepted as an input: name, object, what NumPy makes of it.
READABLE = {
    "bytes": (b"\1\2\3", np.array([1, 2, 3], np.uint8)),
    "bytearray": (bytearray(b"\1\2\3"), np.array([1, 2, 3], np.uint8)),
    "empty": (bytearray(), np.zeros(0, np.uint8)),
    "array.array": (array.array("d", [1, 2]), np.array([1.0, 2.0])),
    "array of int": (array.array("i", [1, -2]), np.array([1, -2], np.int32)),
    "ctypes": ((ctypes.c_float * 2)(1, 2), np.array([1, 2], np.float32)),
    "two dimensions of ctypes": (((ctypes.c_int16 * 2) * 3)(), np.zeros((3, 2), np.int16)),
    "memoryview": (memoryview(FLOATS).cast("B").cast("f", (2, 3)), FLOATS.reshape(2, 3)),
    "every second": (memoryview(FLOATS)[::2], FLOATS[::2]),
    "read-only memoryview": (memoryview(FLOATS).toreadonly(), FLOATS),
    "NumPy scalar": (np.float32(3), np.array(3, np.float32)),
    "subclass": (FLOATS.view(np.recarray), FLOATS),
}
WRITABLE = ["bytearray", "array.array", "array of int", "ctypes", "two dimensions of ctypes", "memoryview"]
NAMES = ["all_sum", "all_gather", "sum_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all"]


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("name", NAMES)
def test_input(name, kind):
    buffer, expected = READABLE[kind]
    result = getattr(mlxdist, name)(buffer)
    assert isinstance(result, np.ndarray) and result.dtype == expected.dtype and result.shape == expected.shape
    assert np.array_equal(result, expected) and not np.shares_memory(result, np.asarray(memoryview(buffer)))


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("name", NAMES)
def test_out(name, kind):
    """Any shape, as long as the elements fit; what was given comes back, also when it is the input."""
    buffer, expected = READABLE[kind]
    values = expected + 1
    assert getattr(mlxdist, name)(values, out=buffer) is buffer
    assert np.array_equal(np.asarray(memoryview(buffer)), values)
    assert getattr(mlxdist, name)(buffer, out=buffer) is buffer
    assert np.array_equal(np.asarray(memoryview(buffer)), values)
    assert getattr(mlxdist, name)(expected.reshape(expected.shape), out=buffer) is buffer


def test_memory_of_files(tmp_path):
    with (tmp_path / "data").open("wb+") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as memory:
            assert mlxdist.all_sum(np.full(4096, 7, np.uint8), out=memory) is memory
    mapped = np.memmap(tmp_path / "data", np.uint8, "r+")
    assert np.array_equal(mlxdist.all_gather(mapped), np.full(4096, 7, np.uint8))
    assert mlxdist.all_sum(np.zeros(4096, np.uint8), out=mapped) is mapped and not mapped.any()


@pytest.mark.parametrize(
    "out, words",
    [
        (memoryview(np.zeros(6, np.float32)).toreadonly(), "out is read-only"),
        (bytearray(24), "out must have shape (6,) and dtype float32, not (24,) and uint8"),
        (array.array("f", [0] * 5), "not (5,) and float32"),
        (array.array("i", [0] * 6), "not (6,) and int32"),
        (memoryview(np.zeros(12, np.float32))[::2], "out must be contiguous"),
        ([0.0] * 6, "out must be a numpy.ndarray or another writable buffer, not list"),
        (mx.zeros(6), "not an mx.array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_out_is_rejected(out, words):
    with pytest.raises(mlxdist.InvalidArgument) as refused:
        mlxdist.all_sum(FLOATS, out=out)
    assert words in str(refused.value) and str(refused.value).startswith("all_sum: ")


@pytest.mark.parametrize(
    "x, words",
    [
        ((ctypes.c_char * 3)(), "dtype bytes8 is not supported"),
        (array.array("u", "text"), "dtype str32 is not supported"),
        ((ctypes.c_void_p * 3)(), "x is a c_void_p_Array_3, whose elements are nothing that NumPy knows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_input_is_rejected(x, words):
    with pytest.raises(mlxdist.InvalidArgument) as refused:
        mlxdist.all_sum(x)
    assert words in str(refused.value) and str(refused.value).startswith("all_sum: ")


@pytest.mark.parametrize(
    "buffer", [[1.0], np.zeros((3, 4)).T, np.zeros(6)[::2], "text", memoryview(b"abc")[::2], mx.zeros((3, 4)).T]
)
def test_what_cannot_be_registered(buffer):
    with pytest.raises(mlxdist.InvalidArgument, match="^register: this .* gives no contiguous memory"):
        mlxdist.init().register(buffer)


@pytest.mark.parametrize("buffer", [bytearray(3), np.zeros((2, 3)), np.zeros(0), np.array(1.0), mx.ones((2, 3))])
def test_registered_in_a_group_of_one(buffer):
    with mlxdist.init().register(buffer) as registration:
        assert registration.nbytes == memoryview(buffer).nbytes
    registration.release()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("scenario", ["buffers", "shapes", "bits", "refused"])
def test_between_ranks(run_scenarios, scenario, ranks):
    run_scenarios("buffers.py", ranks, scenario)
