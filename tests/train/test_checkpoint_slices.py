"""What a rank reads of a checkpoint that ranks have written whose arrays were sharded in another way."""

import itertools
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxdist
from mlxdist.nn.layout.cut import Cut
from mlxdist.train.checkpoint.files import DTYPES, take_snapshots, write_tensors
from mlxdist.train.checkpoint.manifest import Array, File, Manifest, cut_from_json, cut_to_json, stored
from mlxdist.train.checkpoint.reading import Reader


def points(draw, length, count):
    """Where to cut: that many parts, of which some may be empty."""
    return [0, *sorted(draw(st.integers(0, length)) for _ in range(count - 1)), length]


@st.composite
def cuts(draw, shape, ranks):
    """Of each rank, which together have all of the array."""
    flat = draw(st.booleans())
    if not shape:
        return [Cut.full(shape)] * ranks
    axis, length = draw(st.sampled_from(list(enumerate(shape))))
    segments = points(draw, length, draw(st.integers(1, 3)))
    if flat and draw(st.booleans()):
        segments = None  # flat alone
    if segments is None:
        found = [Cut.full(shape)] * ranks
        size = int(np.prod(shape))
        ends = points(draw, size, ranks)
        most = max(stop - start for start, stop in itertools.pairwise(ends))
        return [
            Cut(shape, cut.ranges, (), cut.copies, (ends[rank], ends[rank + 1]), most) for rank, cut in enumerate(found)
        ]
    each = [[] for _ in range(ranks)]
    for start, stop in itertools.pairwise(segments):
        for rank, (a, b) in enumerate(itertools.pairwise(points(draw, stop - start, ranks))):
            each[rank].append((start + a, start + b))
    found = []
    for ranges in each:
        full = Cut.full(shape)
        cut = Cut(shape, (*full.ranges[:axis], tuple(ranges), *full.ranges[axis + 1 :]), (), full.copies)
        if flat:  # in two, of which this rank has both by turns: the other part is another rank's of the next number
            size = int(np.prod(cut.joined))
            middle = draw(st.integers(0, size))
            found += [Cut(shape, cut.ranges, (), cut.copies, (0, middle), size)]
            found += [Cut(shape, cut.ranges, (), cut.copies, (middle, size), size)]
        else:
            found.append(cut)
    return found


def write(directory, full, parts):
    """A checkpoint with a file of each part."""
    array = Array(next(name for name, dtype in DTYPES.items() if dtype == full.dtype), full.shape)
    files = []
    for number, cut in enumerate(map(stored, parts)):
        snapshot = take_snapshots({"x": cut.take(full)})
        size, crc = write_tensors(directory / f"{number}.safetensors", snapshot, {})
        files.append(File(f"{number}.safetensors", size, crc))
        array.parts.append((number, cut))
    manifest = Manifest(1, "run", "now", len(parts), {}, {}, files, {"x": array}, {})
    manifest.write(directory)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_any_parts(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    dtype = data.draw(st.sampled_from([mx.float32, mx.bfloat16, mx.uint8, mx.complex64]))
    full = mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    source, target = data.draw(cuts(shape, data.draw(st.integers(1, 4)))), data.draw(cuts(shape, 3))
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), full, source)
        manifest = Manifest.read(Path(directory))
        assert [cut for _, cut in manifest.arrays["x"].parts] == [stored(cut) for cut in source]
        for cut in target:
            reader = Reader(Path(directory), manifest, mlxdist.init())
            assert reader.missing() is None and reader.verify() is None
            found = reader.read({"x": cut})["x"]
            assert found.dtype == dtype and found.shape == cut.local_shape
            assert mx.array_equal(found, cut.take(full))
            if cut.flat is None or len(source) == 1:
                assert (
                    reader.bytes_read
                    == sum(int(np.prod([axis.stop - axis.start for axis in piece.box])) for piece in cut.pieces())
                    * full.dtype.size
                ), "its slices alone"


@given(st.data())
def test_a_cut_in_a_manifest(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    for cut in data.draw(cuts(shape, 3)):
        assert cut_from_json(list(shape), cut_to_json(cut)) == stored(cut)
