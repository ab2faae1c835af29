"""Fuzz targets: environment variables, hostfiles, what other hosts and ranks send, tuning as a file and from rank 0."""

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlxdist.base import tuning_file
from mlxdist.base.environment import MAX_RANKS, VARIABLES, Environment, format_address, parse_address
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument
from mlxdist.cli.rpc_server import FUNCTIONS
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.hostfile.slurm import expand
from mlxdist.cluster.hostfile.writing import write
from mlxdist.cluster.ssh.protocol import FrameError, Frames, Kind, after_greeting, unpack_json
from mlxdist.cluster.ssh.rpc_client import CallError, unpack_response
from mlxdist.cluster.ssh.rpc_server import respond
from mlxdist.runtime.devices.peer_findings import Course, pack_findings, unpack_findings
from mlxdist.runtime.devices.probe import MESSAGE_SIZES
from mlxdist.runtime.group import tuning

__all__ = ["TARGETS"]

_directory = tempfile.TemporaryDirectory(prefix="mlxdist-fuzz-")


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
    path = Path(_directory.name, "tuning.json")
    path.write_bytes(data[1:])
    with contextlib.suppress(InvalidArgument):
        found = tuning.unpack(data[1:]) if data[:1] == b"\0" else tuning.read(path)
        assert tuning.unpack(tuning.pack(found)) == found
        path.unlink()
        tuning_file.update(path, tuning.sections(found))
        assert tuning.read(path) == found


def findings(data: bytes) -> None:
    """What a rank says of a probe with its peer. What is accepted survives being sent, and has a result."""
    with contextlib.suppress(InvalidArgument):
        found = unpack_findings(data)
        assert unpack_findings(pack_findings(found)) == found
        course = Course()
        for size, finding in zip(MESSAGE_SIZES, found):
            course.add(size, (finding, finding))
        if course.is_over:
            assert course.result().largest in MESSAGE_SIZES


def hosts(data: bytes) -> None:
    """A hostfile of any format, and SLURM's lists. What is accepted is the same again once it has been written, but for
    the ports of a ring, which only a ring has."""
    text = data.decode(errors="replace")
    with contextlib.suppress(InvalidArgument):
        assert 1 <= len(expand(text)) <= MAX_RANKS
    with contextlib.suppress(InvalidArgument):
        found = parse(text)
        assert 1 <= found.ranks <= MAX_RANKS
        again = parse(write(found, "json"))
        hosts = [replace(host, line=0) for host in found.hosts]
        assert [replace(host, line=0) for host in again.hosts] == [replace(host, ports=()) for host in hosts]
        assert (again.backend, again.envs) == (found.backend, found.envs)
        if found.format == "ring":
            again = parse(write(found, "ring"))
            assert [replace(host, line=0) for host in again.hosts] == hosts


def agent_frames(data: bytes) -> None:
    """What comes from the agent on another host, in two pieces. The first byte says where it is cut."""
    frames, cut = Frames(), 1 + data[0] if data else 0
    with contextlib.suppress(FrameError):
        for piece in (data[1:cut], data[cut:]):
            for kind, rank, payload in frames.feed(piece):
                assert 0 <= kind < 1 << 8 and 0 <= rank < 1 << 16 and len(payload) < len(data)
                with contextlib.suppress(FrameError):
                    assert isinstance(unpack_json(payload), dict)


def responses(data: bytes) -> None:
    """A payload between two hosts: as a call, and as a response. Calls that do something are left out."""
    if any(name.encode() in data for name in FUNCTIONS if name != "who"):
        return
    for kind in (Kind.RESULT, Kind.ERROR, 16):
        with contextlib.suppress(FrameError, CallError):
            unpack_response(kind, data)
    with contextlib.suppress(FrameError):
        after_greeting(data)
    ((kind, _, payload),) = Frames().feed(respond(data, FUNCTIONS))
    with contextlib.suppress(CallError):
        assert kind == Kind.ERROR or unpack_response(kind, payload)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "environment": environment,
    "tuning": tuning_table,
    "findings": findings,
    "hostfile": hosts,
    "agent": agent_frames,
    "responses": responses,
}
