"""The files that a job needs on this host: command, directory, script, model. This module runs on that host.

A model may be a directory, a file, or a name such as org/model that Hugging Face's hub has put into its cache.
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlxdist.base.model_directory import find_model
from mlxdist.launch.executable import CannotRun, check_command
from mlxdist.launch.local import base_environment

__all__ = ["digest", "list_model", "program"]

_MAX_FILES = 2000
_FULL_BYTES = 32 << 20  # a file up to this size is read in full
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 20
_READ_BYTES = 8 << 20


def program(command: Sequence[str], script: str, directory: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Whether the command can be started in its directory, and the script's sha256."""
    found: dict[str, Any] = {"directory_error": "", "command_error": "", "script_error": "", "sha256": "", "bytes": 0}
    before = os.getcwd()
    try:
        os.chdir(directory)
    except OSError as error:
        return found | {"directory_error": error.strerror}
    try:
        if command:
            check_command(command[0], base_environment(os.environ) | dict(variables))
        if script:
            found["sha256"] = digest(script, "full")["sha256"]
            found["bytes"] = os.path.getsize(script)
    except CannotRun as error:
        found["command_error"] = str(error)
    except OSError as error:
        found["script_error"] = error.strerror
    finally:
        os.chdir(before)
    return found


def list_model(model: str, directory: str) -> dict[str, Any]:
    """The files of a model with their sizes, and its directory; ``error`` if it is missing."""
    root = find_model(model, directory)
    if root is None:
        return {"error": "it is neither there nor in the cache of Hugging Face's hub", "files": {}, "path": ""}
    if root.is_file():
        return {"error": "", "files": {root.name: root.stat().st_size}, "path": str(root.parent)}
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            files[str(path.relative_to(root))] = path.stat().st_size
            if len(files) == _MAX_FILES:
                break
    return {"error": "" if files else "the directory has no files", "files": files, "path": str(root)}


def digest(path: str, how: str, seconds: float = 600.0) -> dict[str, Any]:
    """The sha256 of a file. ``how``: "full", or "sampled": of a large file, the size and samples."""
    deadline = time.monotonic() + seconds
    size = os.path.getsize(path)
    found = hashlib.sha256()
    with open(path, "rb") as file:
        if how == "sampled" and size > _FULL_BYTES:
            found.update(str(size).encode())
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
        else:
            while data := file.read(_READ_BYTES):
                found.update(data)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} was not read within {seconds:g} s")
    return {"sha256": found.hexdigest()}
