"""Shards of a model in files of their own: they are read as those of the full files, what is missing is an error."""

import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist import InvalidArgument
from mlxdist.base.host_shards import (
    ALL,
    FileShards,
    HostShards,
    PackedShards,
    ShardCheckpoint,
    find_shards,
    open_checkpoint,
    remove_shards,
    write_record,
)
from mlxdist.base.safetensors_reader import Checkpoint, local_shape

NAME = "model.safetensors"


def write(directory, arrays):
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {"dtype": "U8", "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.size]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / NAME).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return Checkpoint(directory)


def pack(checkpoint, directory, parts, chunk=1000):
    """Writes what a host has that is to have ``parts``, as a pull does."""
    packed = PackedShards(checkpoint.files[0], parts)
    shards = HostShards((0,), 2, "tp=2", (FileShards(NAME, checkpoint.files[0].size, packed.size, parts),))
    path = shards.path(directory, shards.files[0])
    path.parent.mkdir(parents=True)
    with packed.open() as reader, path.open("wb") as file:
        while data := reader.read(chunk):
            file.write(data)
    assert path.stat().st_size == packed.size
    write_record(directory, HostShards.from_json(shards.to_json()))
    return path


@st.composite
def tensors(draw):
    """A shape, the part of it that is there (or None), and slices along an axis to read."""
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))

    def pieces(axis):
        ends = sorted(draw(st.sets(st.integers(0, shape[axis]), max_size=6)))
        return tuple(zip(ends[::2], ends[1::2]))

    held = draw(st.integers(0, len(shape) - 1))
    part = draw(st.sampled_from([None, ALL, (held, pieces(held))]))
    part = None if part is not None and part != ALL and not part[1] else part
    axis = draw(st.integers(0, len(shape) - 1))
    return shape, part, axis, [slice(*piece) for piece in pieces(axis)]


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(1, 5000))
def test_reads_what_is_there_and_nothing_else(tmp_path_factory, found, chunk):
    directory = tmp_path_factory.mktemp("shards")
    arrays = {
        f"t{i}": np.random.default_rng(i).integers(0, 256, shape, np.uint8) for i, (shape, _, _, _) in enumerate(found)
    }
    full = write(directory / "full", arrays)
    parts = {f"t{i}": part for i, (_, part, _, _) in enumerate(found) if part is not None}
    pack(full, directory, parts, chunk)
    here = open_checkpoint(directory)
    assert here.files[0].digest == full.files[0].digest
    for name, (shape, part, axis, slices) in zip(arrays, found):
        tensor, whole = here.tensors[name], full.tensors[name]
        assert zlib.crc32(tensor.sample()) == zlib.crc32(whole.sample())
        memory = memoryview(bytearray(int(np.prod(local_shape(shape, axis, slices)))))
        rows = range(shape[axis]) if not slices else [row for each in slices for row in range(each.start, each.stop)]
        held = () if part is None else [row for start, stop in part[1] for row in range(start, stop)]
        there = part == ALL or (part is not None and axis == part[0] and bool(slices) and set(rows) <= set(held))
        assert tensor.has(axis, slices) is there
        if there:
            tensor.read(axis, slices, 0, memory)
            assert bytes(memory) == np.take(arrays[name], rows, axis).tobytes()
        else:
            with pytest.raises(InvalidArgument, match="has just the shards of rank 0 of 2, tp=2, and other weights"):
                tensor.read(axis, slices, 0, memory)


@pytest.fixture
def full(tmp_path):
    return write(tmp_path / "full", {"a": np.arange(200, dtype=np.uint8).reshape(10, 20), "b": np.ones(3, np.uint8)})


def test_the_whole_model_counts_where_it_is(full, tmp_path):
    pack(full, full.directory, {"b": ALL})
    assert find_shards(full.directory) is None and type(open_checkpoint(full.directory)) is Checkpoint
    (full.directory / NAME).rename(tmp_path / NAME)
    assert isinstance(open_checkpoint(full.directory), ShardCheckpoint)
    remove_shards(full.directory)
    with pytest.raises(InvalidArgument, match="mlxdist pull"):
        open_checkpoint(full.directory)


def test_shards_of_another_plan_are_other_files(full, tmp_path):
    first = pack(full, tmp_path, {"a": (1, ((0, 10),))})
    second = pack(full, tmp_path, {"a": (1, ((10, 20),))})
    assert first != second and not first.exists() and second.exists()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"name": "../model.safetensors"}, "no name of a file with weights"),
        ({"name": "config.json"}, "no name of a file with weights"),
        ({"size": -1}, "a whole number"),
        ({"parts": {"a": [0, [[3, 2]]]}}, "empty, overlap or touch"),
        ({"parts": {"a": [0, [[0, 2], [2, 3]]]}}, "empty, overlap or touch"),
        ({"parts": {"a": [0, [[0, 2], [1, 3]]]}}, "empty, overlap or touch"),
        ({"parts": {"a": [0, [[0, 1]] * 5000]}}, "no list of at most"),
        ({"parts": {"a": 1}}, "no list of 2"),
        ({"parts": {"a\n": [0, []]}}, "can be printed"),
        ({"parts": []}, "no object"),
    ],
)
def test_records_are_checked(changed, problem):
    file = {"name": NAME, "size": 3, "packed": 3, "parts": {"a": [0, []]}}
    record = {"ranks": [0], "of": 2, "plan": "tp=2", "files": [file]}
    assert str(HostShards.from_json(json.dumps(record).encode())) == "rank 0 of 2, tp=2"
    with pytest.raises(ValueError, match=problem):
        HostShards.from_json(json.dumps(record | {"files": [file | changed]}).encode())


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"c": ALL}, "it has no tensor 'c'"),
        ({"a": (1, ((0, 21),))}, "has no such part"),
        ({"a": (2, ((0, 1),))}, "has no such part"),
        ({"a": (1, ((0, 9),))}, "bytes, and its shards would have"),
    ],
)
def test_records_of_other_shards_than_are_there(full, tmp_path, parts, problem):
    path = pack(full, tmp_path, {"a": (1, ((0, 10),))})
    shards = find_shards(tmp_path)
    other = HostShards((0,), 2, "tp=2", (FileShards(NAME, shards.files[0].size, shards.files[0].packed, parts),))
    moved = other.path(tmp_path, other.files[0])
    moved.parent.mkdir()
    path.rename(moved)
    write_record(tmp_path, other)
    with pytest.raises(InvalidArgument, match=f"is damaged: .*{problem}.*; pull the model again"):
        open_checkpoint(tmp_path)


def test_a_damaged_record_and_a_missing_file(full, tmp_path):
    path = pack(full, tmp_path, {"b": ALL})
    (tmp_path / ".mlxdist-shards" / "record.json").write_bytes(b"[" * 100)
    with pytest.raises(InvalidArgument, match=r"record.json is damaged: .*; type: mlxdist pull"):
        open_checkpoint(tmp_path)
    pack(full, tmp_path / "other", {"b": ALL}).unlink()
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        open_checkpoint(tmp_path / "other")
    assert path.exists()
