"""Fuzz targets: files of a model: weights as safetensors, plans of how a model is sharded, lists of its files, records
of the shards on a host."""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import HostShards
from mlxdist.base.safetensors_reader import WeightFile
from mlxdist.nn.models.plan import Plan
from mlxdist.tools.models.places import Manifest

__all__ = ["TARGETS"]

_directory = tempfile.TemporaryDirectory(prefix="mlxdist-fuzz-")


def safetensors(data: bytes) -> None:
    """Tensors of a file that is accepted lie in it, do not overlap, and can be read to their last byte."""
    path = Path(_directory.name, "model.safetensors")
    path.write_bytes(data)
    with contextlib.suppress(InvalidArgument):
        file = WeightFile(path)
        assert len(file.header) + sum(tensor.nbytes for tensor in file.tensors.values()) == len(data)
        for tensor in file.tensors.values():
            memory = bytearray(tensor.nbytes)
            tensor.read(0, [], 0, memoryview(memory))
            assert memory == data[tensor.offset : tensor.offset + tensor.nbytes]


def plan(data: bytes) -> None:
    """A plan that is accepted says what each rank holds, and is the same again once it has been written."""
    with contextlib.suppress(InvalidArgument):
        found = Plan.from_json(data.decode(errors="replace"))
        assert Plan.from_json(found.to_json()) == found
        assert str(found) and found.bytes(0) <= sum(math.prod(shard.shape) * 8 for shard in found.shards.values())


def manifest(data: bytes) -> None:
    """Files of a list that is accepted lie inside of the directory of the model, and are not hidden there."""
    root = Path(_directory.name, "root")
    with contextlib.suppress(ValueError):
        found = Manifest.from_json(data)
        assert Manifest.from_json(found.to_json()) == found
        for file in found.files:
            path = Path(os.path.normpath(root / file.name))
            assert root in path.parents and not any(part.startswith(".") for part in path.relative_to(root).parts)
            assert Path(os.path.normpath(root / "blobs" / file.blob)).is_relative_to(root / "blobs")


def host_shards(data: bytes) -> None:
    """Files of a record that is accepted lie inside of the directory of the model; slices are not empty or twice."""
    root = Path(_directory.name, "root")
    with contextlib.suppress(ValueError):
        found = HostShards.from_json(data)
        assert HostShards.from_json(found.to_json()) == found
        assert str(found).isprintable()
        for file in found.files:
            assert root in Path(os.path.normpath(found.path(root, file))).parents
            for _, pieces in file.parts.values():
                rows = [end for piece in pieces for end in piece]
                assert rows == sorted(set(rows))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": safetensors,
    "plan": plan,
    "manifest": manifest,
    "host_shards": host_shards,
}
