"""Paths that a user names: ``~`` is the home directory in each of them, not only where a shell has replaced it."""

import os
from typing import Any

import click

__all__ = ["USER_PATH", "UserPath"]


class UserPath(click.Path):
    """A path of a command line. No shell replaces the ``~`` of ``--option=~/file``."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), parameter, context)


USER_PATH = UserPath()
