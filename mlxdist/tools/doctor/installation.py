"""What mlxdist was built with and installed by, and which machine this is. Runs on that host."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import socket
import sys

from mlxdist.base.own_python import own_code

from .facts import output_of

__all__ = ["installation"]


def installation() -> dict[str, str]:
    """Empty values: not known here. "host": by what name the machine knows itself."""
    found = {
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}, {platform.python_compiler()}",
        "environment": _environment(),
        "pip": _version("pip"),
        "uv": output_of("uv", "--version").strip(),
        "mlx-metal": _version("mlx-metal"),
    }
    if sys.platform == "darwin":
        # A Python that was linked with an SDK before macOS 26 may read 16 there; the kernel's number is right.
        found |= {
            "macOS": output_of("sw_vers", "-productVersion").strip(),
            "macOS build": output_of("sw_vers", "-buildVersion").strip(),
            "macOS as Python reads it": platform.mac_ver()[0],
            "model": output_of("sysctl", "-n", "hw.model").strip(),
            "chip": output_of("sysctl", "-n", "machdep.cpu.brand_string").strip(),
        }
    return found | _build()


def _build() -> dict[str, str]:
    """The bridge says it; in a process of its own, since to import it is what may fail."""
    text = output_of(*own_code(_ASK_BRIDGE), seconds=60.0)
    return dict(re.findall(r"^(compiler|nanobind)=(.*)$", text, re.MULTILINE))


_ASK_BRIDGE = """
from mlxdist.runtime.native import bridge
print(f"compiler={bridge.compiler}")
print(f"nanobind={bridge.nanobind}")
"""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _environment() -> str:
    """How this Python was set up, without its path."""
    kinds = {"conda": "conda", "uv": "uv", "framework": "Python.framework", "homebrew": "Homebrew", "pyenv": "pyenv"}
    paths = f"{sys.prefix} {sys.base_prefix}".lower()
    names = [name for word, name in kinds.items() if f"/{word}" in paths or f"{word}/" in paths]
    return ", ".join([*names, "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"])
