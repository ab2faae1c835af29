"""Fuzz targets: files of a model: weights as safetensors, and plans of how a model is sharded."""

import contextlib
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.safetensors_reader import WeightFile
from mlxdist.nn.models.plan import Plan

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


TARGETS: dict[str, Callable[[bytes], None]] = {"safetensors": safetensors, "plan": plan}
