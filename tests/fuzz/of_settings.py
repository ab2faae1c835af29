"""Fuzz targets: environment variables, and tuning tables as files and as rank 0 sends them."""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlxdist import tuning
from mlxdist.environment import VARIABLES, Environment, format_address, parse_address
from mlxdist.errors import EnvironmentVariableError, InvalidArgument

__all__ = ["TARGETS"]

_folder = tempfile.TemporaryDirectory(prefix="mlxdist-fuzz-")


def environment(data: bytes) -> None:
    """Lines: a byte that chooses the variable, and its value. The first one is taken for an address, too."""
    values = {}
    for line in data.split(b"\n"):
        if line:
            values[VARIABLES[line[0] % len(VARIABLES)].name] = line[1:].decode(errors="surrogateescape")
    with contextlib.suppress(EnvironmentVariableError):
        read = Environment.read(values)
        assert 0 <= read.rank < read.world_size
        assert read.world_size == 1 or len(read.secret) >= 16
    with contextlib.suppress(ValueError):
        address = parse_address(data.split(b"\n")[0].decode(errors="surrogateescape"))
        assert parse_address(format_address(*address)) == address


def tuning_table(data: bytes) -> None:
    """What is accepted survives being written, and being sent to another rank. The first byte says what the others are:
    a file, or what rank 0 sends."""
    path = Path(_folder.name, "tuning.json")
    path.write_bytes(data[1:])
    with contextlib.suppress(InvalidArgument):
        rows = tuning.unpack(data[1:]) if data[:1] == b"\0" else tuning.read(path)
        assert tuning.unpack(tuning.pack(rows)) == rows
        tuning.write(path, rows)
        assert tuning.read(path) == rows


TARGETS: dict[str, Callable[[bytes], None]] = {
    "environment": environment,
    "tuning": tuning_table,
}
