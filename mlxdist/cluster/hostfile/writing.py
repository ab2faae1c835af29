"""Writes hostfiles: from any format into any other that can hold the content."""

import json
import os
from typing import Any

from mlxdist.base.atomic_file import atomic_write
from mlxdist.base.environment import format_address
from mlxdist.base.errors import InvalidArgument

from .hosts import FORMATS, Host, Hostfile

__all__ = ["left_out", "save", "write"]

_FIRST_PORT = 32323  # MLX's launcher begins there, too


def write(hostfile: Hostfile, format: str) -> str:
    """The text of ``hostfile`` in ``format``: json, slots, colon or ring.

    Content that the format cannot hold is an error, except what `left_out` lists.

    Raises:
        InvalidArgument: there is no such format, or it cannot hold something in the hostfile.
    """
    if format not in FORMATS:
        raise InvalidArgument(f"a hostfile has one of the formats {', '.join(FORMATS)}, not {format!r:.80}")
    if format == "json":
        return _json(hostfile)
    if format == "ring":
        return _ring(hostfile)
    if lost := _lost(hostfile, format):
        raise InvalidArgument(f"{hostfile.source}: the format {format} has no place for {', '.join(lost)}; use json")
    return "".join(_line(host, format) for host in hostfile.merged().hosts)


def left_out(hostfile: Hostfile, format: str) -> list[str]:
    """The content that `write` silently leaves out: for a ring, which lists addresses alone, all other fields; for
    other formats, the ports of a ring, which may change."""
    if format == "ring":
        return _lost(hostfile, format)
    return ["the ports"] if any(host.ports for host in hostfile.hosts) else []


def save(hostfile: Hostfile, path: str | os.PathLike[str], format: str = "json") -> None:
    """Writes a file. Readers of ``path`` see either the old or the new content. Raises InvalidArgument: the file cannot
    be written, and the old one is unchanged; or what `write` raises."""
    text = write(hostfile, format)
    try:
        atomic_write(path, text)
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error.strerror}") from None


def _json(hostfile: Hostfile) -> str:
    """MLX's format. "slots" is written only where it is not 1, because MLX has no such field."""
    hosts = ",\n".join(f"    {json.dumps(_entry(host))}" for host in hostfile.hosts)
    text = f'{{\n  "backend": {json.dumps(hostfile.backend)},\n' if hostfile.backend else "{\n"
    return text + f'  "envs": {json.dumps(list(hostfile.envs))},\n  "hosts": [\n{hosts}\n  ]\n}}\n'


def _entry(host: Host) -> dict[str, Any]:
    entry: dict[str, Any] = {"ssh": host.name, "ips": list(host.ips)}
    if host.rdma:
        entry["rdma"] = [None if not row else row[0] if len(row) == 1 else list(row) for row in host.rdma]
    if host.slots != 1:
        entry["slots"] = host.slots
    if host.denied:
        entry["denied"] = host.denied
    return entry


def _ring(hostfile: Hostfile) -> str:
    """The lists that MLX's ring reads from MLX_HOSTFILE: addresses and ports of each rank."""
    rows: list[list[str]] = []
    for host in hostfile.hosts:
        if not host.ips:
            raise InvalidArgument(f'{hostfile.source}: {host.name} has no IP address, and a ring needs one; add "ips"')
        for _ in range(host.slots):
            # Ranks of one host share its addresses, so each rank needs a port of its own.
            ports = host.ports if host.slots == 1 and host.ports else (_FIRST_PORT + len(rows),) * len(host.ips)
            rows.append([format_address(ip, port) for ip, port in zip(host.ips, ports)])
    return json.dumps(rows) + "\n"


def _lost(hostfile: Hostfile, format: str) -> list[str]:
    """The content that lines, or the addresses of a ring, cannot hold."""
    names, is_ring = [host.name for host in hostfile.hosts], format == "ring"
    content = {
        "a backend": hostfile.backend and not (is_ring and hostfile.backend == "ring"),
        "environment variables": hostfile.envs,
        "devices of cables": any(host.rdma for host in hostfile.hosts),
        "hosts that are denied": any(host.denied for host in hostfile.hosts),
        "names for ssh": is_ring and any(host.name not in host.ips for host in hostfile.hosts),
        "IP addresses besides names": not is_ring and any(set(host.ips) - {host.name} for host in hostfile.hosts),
        "users of ssh": format == "colon" and any("@" in name for name in names),
    }
    return [what for what, there in content.items() if there]


def _line(host: Host, format: str) -> str:
    if format == "slots":
        return f"{host.name} slots={host.slots}\n"
    return f"[{host.name}]:{host.slots}\n" if ":" in host.name else f"{host.name}:{host.slots}\n"
