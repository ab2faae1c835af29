"""Results of probes, kept until the machine restarts.

A probe without a peer takes every queue pair of a device for a moment. A rank that probed so at its start would take
them from another rank that connects, which on macOS 27 has 3 to share. So a job makes none: `mlxdist devices --probe`
does, once, and ranks read what it has found. A probe with a peer takes no more than the job then has, and the first job
of two hosts makes it (runtime/group/first_contact.py).

A result counts for a device with the same name, GUID and firmware, under the same kernel and since the same boot. On a
Mac the driver is a part of macOS, so another driver means another boot.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxdist.base import logger
from mlxdist.base.atomic_file import replace_file
from mlxdist.base.cache_directory import cache_directory
from mlxdist.base.errors import ResourceError
from mlxdist.base.host_identity import boot_identity
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import fields_of, list_of, number, object_of, or_null, plain_text, read_bounded, row_of

from .device import Device
from .probe import PeerProbe, Probe

__all__ = ["check_keeping", "keep_probes", "with_probes"]

SCHEMA = 2
_MAX_BYTES = 256 * 1024
_MAX_DEVICES = 256
_TEXT = plain_text(1024)
_RESULTS = (or_null(object_of(Probe)), or_null(object_of(PeerProbe)))
_DEVICE = row_of(row_of(_TEXT, _TEXT, _TEXT, _TEXT), *_RESULTS)
_FIELDS = {"schema": number(SCHEMA, SCHEMA), "boot": _TEXT, "system": _TEXT, "devices": list_of(_DEVICE, _MAX_DEVICES)}

_Key = tuple[str, ...]
_Results = tuple[Probe | None, PeerProbe | None]
_NONE: _Results = (None, None)


def check_keeping() -> Path:
    """The file that results are kept in.

    Raises:
        ResourceError: this user has no home directory, or may not write there; or the system does not tell one boot
            from the next.
    """
    path = _path()
    if path is None or not boot_identity():
        raise ResourceError("this user has no home directory" if path is None else "this system has no boot identifier")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ResourceError(f"{path.parent} cannot be made: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise ResourceError(f"{path.parent} cannot be written")
    return path


def keep_probes(devices: Iterable[Device]) -> Path | None:
    """Keeps the results of these devices in place of earlier ones of their kind. Returns the file; None without any.

    Those of the software provider are not kept, since they are those of its profile, which differs from job to job.

    Raises:
        OSError: the file cannot be written.
        ResourceError: as `check_keeping` raises it.
    """
    kept = _read()
    found: dict[_Key, _Results] = {}
    for device in devices:
        probe = None if device.probe is None or device.probe.error else device.probe
        if device.provider != "soft" and (probe or device.peer_probe):
            earlier = kept.get(_key(device), _NONE)
            found[_key(device)] = (probe or earlier[0], device.peer_probe or earlier[1])
    if not found:
        return None
    path = check_keeping()
    rows = [[key, *(result and vars(result) for result in results)] for key, results in (kept | found).items()]
    replace_file(path, json.dumps(_current() | {"devices": rows}, indent=1) + "\n", 0o600)
    return path


def with_probes(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices with the kept results of what was not probed now. A file that is damaged has none, with a warning."""
    kept = _read()
    results = [(device, *kept.get(_key(device), _NONE)) for device in devices]
    return tuple(replace(device, probe=device.probe or probe, peer_probe=peer) for device, probe, peer in results)


def _read() -> dict[_Key, _Results]:
    path = _path()
    if path is None or not os.path.exists(path):
        return {}
    try:
        content = parse_json(read_bounded(path, _MAX_BYTES))
        if type(content) is dict and content.get("schema") != SCHEMA:  # of another version of mlxdist
            return {}
        content = fields_of(_FIELDS, content)
    except ValueError as error:
        logger.warn("connection", f"{path} is damaged: {error}; replace it with `mlxdist devices --probe`")
        return {}
    is_current = content["boot"] and all(content[name] == value for name, value in _current().items())
    return {key: (probe, peer_probe) for key, probe, peer_probe in content["devices"]} if is_current else {}


def _path() -> Path | None:
    try:
        return cache_directory() / "probes.json"
    except RuntimeError:  # this user has no home directory
        return None


def _current() -> dict[str, Any]:
    kernel = os.uname()
    return {"schema": SCHEMA, "boot": boot_identity(), "system": f"{kernel.sysname} {kernel.release} {kernel.version}"}


def _key(device: Device) -> _Key:
    return device.provider, device.name, device.guid, device.firmware
