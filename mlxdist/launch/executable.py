"""Whether a command can be run, before anything is started, and with the exit status that shells give it."""

import os
import shutil
from collections.abc import Mapping

import click

__all__ = ["CannotRun", "check_command"]


class CannotRun(click.ClickException):
    """The command does not exist (127) or is not executable (126), as shells have it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # of its class, says click


def check_command(name: str, variables: Mapping[str, str], directory: str = "") -> None:
    """Raises CannotRun if the command cannot be run. ``directory``: where it will start; empty for the current one."""
    path = variables.get("PATH", os.defpath)
    places = [os.path.join(parent, name) for parent in path.split(os.pathsep) if parent]
    if "/" in name:
        name = os.path.join(directory, name)
        places = [name]
    if shutil.which(name, path=path) is not None:
        return
    if any(map(os.path.exists, places)):
        what = "a directory" if os.path.isdir(name) else "not executable"
        raise CannotRun(f"{name} is {what}; give the program that runs it, or chmod +x it", 126)
    where = "" if "/" in name else " in PATH"
    raise CannotRun(f"The command {name!r} does not exist{where}; nothing was started", 127)
