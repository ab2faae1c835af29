"""Whether a command can be run, before anything is started, and with the exit status that shells give it."""

import os
import shutil
from collections.abc import Mapping

__all__ = ["CannotRun", "check_command"]


class CannotRun(Exception):
    """The command does not exist (127) or is not executable (126), as shells have it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def check_command(name: str, variables: Mapping[str, str], directory: str = "") -> None:
    """``directory``: where it will be started, if that is not the current one."""
    if "/" in name:
        name = os.path.join(directory, name)
        exists = os.path.exists(name)
        found = os.access(name, os.X_OK) and not os.path.isdir(name)
    else:
        path = variables.get("PATH", os.defpath)
        found = shutil.which(name, path=path) is not None
        exists = found or any(
            os.path.exists(os.path.join(directory, name)) for directory in path.split(os.pathsep) if directory
        )
    if found:
        return
    if exists:
        what = "a directory" if os.path.isdir(name) else "not executable"
        raise CannotRun(f"{name} is {what}; give the program that runs it, or chmod +x it", 126)
    where = "" if "/" in name else " in PATH"
    raise CannotRun(f"The command {name!r} does not exist{where}; nothing was started", 127)
