"""Slices of safetensors files: as NumPy slices them, nothing else read; damaged files are named errors."""

import json
import math
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.safetensors_reader import INDEX, ITEM_SIZES, Checkpoint, WeightFile, local_shape

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def write(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, list[int], int, list[slice]]:
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    ends = st.tuples(st.integers(0, shape[axis]), st.integers(0, shape[axis]))
    slices = [slice(min(pair), max(pair)) for pair in draw(st.lists(ends, min_size=0, max_size=3))]
    return draw(st.sampled_from(sorted(ITEM_SIZES))), shape, axis, slices


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cuts(), before=st.integers(0, 9), window=st.tuples(st.integers(0, 64), st.integers(0, 64)))
def test_slices_are_those_of_numpy_and_nothing_else_is_read(tmp_path, cut, before, window):
    dtype, shape, axis, slices = cut
    size = ITEM_SIZES[dtype]
    x = np.random.default_rng(0).integers(0, 256, math.prod(shape) * size, np.uint8)
    header = {"first": entry("U8", [before], 0, before), "x": entry(dtype, shape, before, before + x.size)}
    path = write(tmp_path / "model.safetensors", header, bytes(before) + x.tobytes())
    array = x.view(UNSIGNED[size]).reshape(shape)
    index = (slice(None),) * axis
    expected = np.concatenate([array[(*index, part)] for part in slices], axis) if slices else array
    assert local_shape(shape, axis, slices) == expected.shape
    file = WeightFile(path)
    tensor = file.tensors["x"]
    assert (tensor.shape, tensor.nbytes) == (tuple(shape), x.size)
    first = min(window[0], expected.nbytes)
    for start, stop in ((0, expected.nbytes), (first, min(first + window[1], expected.nbytes))):
        memory, bytes_read = np.empty(stop - start, np.uint8), file.bytes_read
        tensor.read(axis, slices, start, memoryview(memory))
        assert memory.tobytes() == expected.tobytes()[start:stop]
        assert file.bytes_read - bytes_read == stop - start


def test_reads_what_mlx_writes(tmp_path):
    """Also the dtypes that NumPy does not have, with their names."""
    dtypes = (mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.int64, mx.float16, mx.bfloat16, mx.float32, mx.complex64)
    arrays = {str(dtype).removeprefix("mlx.core."): mx.arange(24).reshape(4, 6).astype(dtype) for dtype in dtypes}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays, metadata={"format": "mlx"})
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        memory = np.empty((4, 2), UNSIGNED[array.dtype.size])
        checkpoint.tensors[name].read(1, [slice(3, 5)], 0, memoryview(memory.reshape(-1).view(np.uint8)))
        assert mx.array_equal(mx.array(memory).view(array.dtype), array[:, 3:5])
    assert checkpoint.bytes_read == sum(array.nbytes for array in arrays.values()) // 3


def test_every_dtype_is_one_that_mlx_loads(tmp_path):
    for dtype, size in ITEM_SIZES.items():
        path = write(tmp_path / "x.safetensors", {"x": entry(dtype, [1], 0, size)}, bytes(size))
        try:
            loaded = mx.load(str(path))["x"]
        except RuntimeError as error:
            raise AssertionError(dtype) from error
        assert loaded.dtype.size == size


ONE = {"x": entry("U8", [4], 0, 4)}
DAMAGED = {
    "empty file": (b"", None, b"", "it has 8 bytes, and its header would have 0"),
    "giant header": (b"{}", 2**63, b"", "its header would have 9223372036854775808"),
    "header longer than the limit": (b"{}", 100_000_001, b"", "100000001"),
    "header behind the end": (b"{}", 3, b"", "its header would have 3"),
    "no JSON": (b"{x}", None, b"", "not the JSON"),
    "no UTF-8": (b'{"\xff"}', None, b"", "not the JSON"),
    "nested": (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, b"", "not the JSON"),
    "a list": (b"[]", None, b"", "not a JSON object"),
    "twice": (b'{"x":1,"x":1}', None, b"", "twice"),
    "NaN": (b'{"x":NaN}', None, b"", "NaN"),
    "no entry": ({"x": 3}, None, b"", "'x' does not have"),
    "fields missing": ({"x": {"dtype": "U8"}}, None, b"", "'x' does not have"),
    "dtype unknown": ({"x": entry("F6_E2M3", [4], 0, 3)}, None, bytes(3), "'x' has dtype 'F6_E2M3', which MLX"),
    "dtype no text": ({"x": entry(["U8"], [4], 0, 4)}, None, bytes(4), "'x' has dtype"),
    "negative shape": ({"x": entry("U8", [-4], 0, 4)}, None, bytes(4), "'x' has shape [-4]"),
    "shape of truths": ({"x": entry("U8", [True], 0, 1)}, None, bytes(1), "'x' has shape [True]"),
    "huge shape": ({"x": entry("U8", [2**62, 2**62], 0, 4)}, None, bytes(4), "'x' of dtype U8"),
    "offsets the wrong way": ({"x": entry("U8", [4], 4, 0)}, None, bytes(4), "'x' has data_offsets [4, 0]"),
    "three offsets": ({"x": entry("U8", [4], 0, 4) | {"data_offsets": [0, 2, 4]}}, None, bytes(4), "data_offsets"),
    "shape and offsets differ": ({"x": entry("U16", [4], 0, 4)}, None, bytes(4), "takes 8 bytes"),
    "behind the end": (ONE, None, bytes(3), "'x' ends at byte"),
    "overlap": ({"x": entry("U8", [4], 0, 4), "y": entry("U8", [3], 2, 5)}, None, bytes(5), "'y' at byte"),
    "gap": ({"x": entry("U8", [4], 0, 4), "y": entry("U8", [1], 5, 6)}, None, bytes(6), "does not follow on"),
    "more at the end": (ONE, None, bytes(6), "2 bytes at its end"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_a_named_error(tmp_path, case):
    header, length, data, words = DAMAGED[case]
    path = write(tmp_path / "model-00001-of-00002.safetensors", header, data, length)
    with pytest.raises(InvalidArgument) as caught:
        WeightFile(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_every_truncation_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"x": mx.zeros((3, 2)), "y": mx.ones((5,))})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidArgument):
            WeightFile(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.binary(min_size=1, max_size=6))
def test_a_changed_byte_is_an_error_or_another_right_header(tmp_path, place, change):
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"x": mx.zeros((3, 2)), "y": mx.ones((5,), mx.bfloat16)})
    content = bytearray(path.read_bytes())
    start = int(place * len(content))
    content[start : start + len(change)] = change
    path.write_bytes(content)
    try:
        file = WeightFile(path)
    except InvalidArgument:
        return
    for tensor in file.tensors.values():
        tensor.read(0, [], 0, memoryview(bytearray(tensor.nbytes)))


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = write(tmp_path / "model.safetensors", ONE, b"abcd")
    tensor = WeightFile(path).tensors["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidArgument, match="it ends at byte .*, and had"):
        tensor.read(0, [], 0, memoryview(bytearray(4)))
    path.unlink()
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        tensor.read(0, [], 0, memoryview(bytearray(4)))


def test_several_files_and_their_index(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write(tmp_path / names[0], ONE, b"abcd")
    write(tmp_path / names[1], {"y": entry("U8", [2], 0, 2)}, b"ef")
    index = {"x": names[0], "y": names[1]}
    for weight_map in (None, index):
        if weight_map:
            (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        assert {name: tensor.file.path.name for name, tensor in Checkpoint(tmp_path).tensors.items()} == index
    for weight_map, words in [
        (index | {"z": "model-3.safetensors"}, "model-3.safetensors is missing"),
        (index | {"y": names[0]}, "tensor 'y' is not in"),
        (index | {"z": names[0]}, "tensor 'z' is not in"),
        (index | {"z": 3}, "is damaged: it has no weight_map"),
        (None, "is damaged: it has no weight_map"),
    ]:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InvalidArgument, match=words):
            Checkpoint(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(InvalidArgument, match="is damaged"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).unlink()
    write(tmp_path / names[1], ONE, b"abcd")
    with pytest.raises(InvalidArgument, match="tensor 'x' is in .*00001.* and in .*00002"):
        Checkpoint(tmp_path)
    with pytest.raises(InvalidArgument, match=r"there is no model\*\.safetensors"):
        Checkpoint(tmp_path / "nothing")
