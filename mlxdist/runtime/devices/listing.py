"""Lists the devices in a process of its own: drivers hang, and crash, on ports that are down.

python -m mlxdist.runtime.devices.listing PROVIDER SOFT_PROFILE SECONDS [pyverbs|probe]     prints JSON
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlxdist.base import errors
from mlxdist.base.child_process import module_command
from mlxdist.base.json_reader import parse_json
from mlxdist.runtime.internal_thread import InternalThread

from .device import Device, list_devices
from .probe_cache import with_probes

__all__ = ["Listing", "list_apart", "may_have_devices"]

# Of the child, to start and to say what has hung: beyond that nothing comes.
_MARGIN = 5.0


@dataclass(frozen=True)
class Listing:
    """The devices of a provider, or why there are none: ``error`` is empty where the provider has responded."""

    provider: str
    devices: tuple[Device, ...] = ()
    error: str = ""
    source: str = "mlxdist"  # or "pyverbs"


def list_apart(
    provider: str, soft_profile: str = "ideal", seconds: float = 10.0, pyverbs: bool = False, probe: bool = False
) -> Listing:
    """All devices of a provider, with the kept results of probes. Never raises, never waits much longer than
    ``seconds``.

    Args:
        pyverbs: rdma-core's Python bindings list them, where they are installed.
        probe: probe each active device: that takes all its queue pairs for a moment. pyverbs does not. The
            result counts in place of a kept one.
    """
    command = module_command("mlxdist.runtime.devices.listing", provider, soft_profile, f"{seconds:g}")
    if probe:
        command.append("probe")
    elif pyverbs and provider == "ibverbs" and importlib.util.find_spec("pyverbs"):
        command.append("pyverbs")
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Listing(provider, error=f"cannot start {sys.executable} to list the devices: {error.strerror}")
    try:
        output, complaint = child.communicate(timeout=seconds + _MARGIN)
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: in a driver, not even SIGKILL ends a process at once
        InternalThread(target=child.wait, daemon=True).start()
        return Listing(provider, error=f"listing the devices of {provider} has not ended after {seconds + _MARGIN:g} s")
    except BaseException:
        child.kill()
        raise
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return Listing(provider, error=f"listing the devices of {provider} crashed ({name}): its driver is broken")
    try:
        response = parse_json(output)
    except ValueError:
        last = complaint.strip().splitlines()[-1:] or ["it printed nothing"]
        return Listing(provider, error=f"listing the devices of {provider} failed: {last[0]}")
    devices = tuple(Device.from_json(fields) for fields in response["devices"])
    return Listing(provider, with_probes(devices), response["error"], response["source"])


def may_have_devices() -> bool:
    """Whether this machine's kernel knows of RDMA devices, as far as that is known without the library."""
    if sys.platform == "darwin":
        return True
    directory = Path("/sys/class/infiniband")
    return directory.is_dir() and any(directory.iterdir())


def _respond(provider: str, soft_profile: str, seconds: float, pyverbs: bool, probe: bool) -> Listing:
    try:
        if pyverbs:
            from . import with_pyverbs

            return Listing(provider, tuple(with_pyverbs.list_devices()), source="pyverbs")
        return Listing(provider, tuple(list_devices(provider, soft_profile, seconds, probe)))
    except errors.Error as error:
        return Listing(provider, error=str(error), source="pyverbs" if pyverbs else "mlxdist")


def _main(arguments: list[str]) -> None:
    provider, profile, seconds, *how = arguments
    listing = _respond(provider, profile, float(seconds), "pyverbs" in how, "probe" in how)
    devices = [device.to_json() for device in listing.devices]
    print(json.dumps(vars(listing) | {"devices": devices}), flush=True)
    os._exit(0)  # a thread that hangs in a driver is not waited for


if __name__ == "__main__":
    _main(sys.argv[1:])
