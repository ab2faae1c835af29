"""Files that commands write what they have found into: tried before the work, and never the end of what it was for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["OUTPUT_FILE", "is_written", "try_to_open"]


class _OutputFile(click.Path):
    """A file that can be written, as far as that can be known beforehand; else a usage error."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        path = super().convert(value, parameter, context)
        if not path.absolute().parent.is_dir():
            self.fail(f"{path}: there is no folder {path.absolute().parent}", parameter, context)
        try:
            try_to_open(path)
        except OSError as error:
            self.fail(f"{path} cannot be written: {error.strerror}; name another file", parameter, context)
        return path


OUTPUT_FILE = _OutputFile()


def is_written(path: Path, write: Callable[[Path], object]) -> bool:
    """Whether ``write(path)`` has succeeded; if not, that is told, and the caller goes on: there is more to show."""
    try:
        write(path)
    except OSError as error:
        click.echo(f"Error: {path} is not written: {error.strerror or error}", err=True)
        return False
    return True


def try_to_open(path: Path) -> None:
    """Leaves the file as it is, or none where there was none. Raises OSError."""
    if path.is_file():
        os.close(os.open(path, os.O_WRONLY))
    elif not path.exists():  # a pipe would be waited for, and its reader told that this was all
        target = os.path.realpath(path)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(target)
