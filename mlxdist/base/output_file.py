"""Files of a command's results: checked before the work, and a failure to write one does not end the command."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .atomic_file import atomic_write
from .user_path import UserPath

__all__ = ["OUTPUT_FILE", "is_written", "try_to_open"]


class _OutputFile(UserPath):
    """A file that can be written, as far as a test beforehand shows; any other one is a usage error."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        if not path.absolute().parent.is_dir():
            self.fail(f"{path}: there is no directory {path.absolute().parent}", parameter, context)
        try:
            try_to_open(path)
        except OSError as error:
            self.fail(f"{path} cannot be written: {error.strerror}; name another file", parameter, context)
        return path


OUTPUT_FILE = _OutputFile()


def is_written(path: Path, content: str | Callable[[Path], object]) -> bool:
    """Writes the text, or calls ``content(path)`` to write it, and returns whether that worked. On failure it prints an
    error and returns, because a command may have more results to show."""
    try:
        if isinstance(content, str):
            atomic_write(path, content)
        else:
            content(path)
    except OSError as error:
        click.echo(f"Error: {path} is not written: {error.strerror or error}", err=True)
        return False
    return True


def try_to_open(path: Path) -> None:
    """Raises OSError if the file cannot be written. Leaves it unchanged, and leaves no file where there was none."""
    if path.is_file():
        os.close(os.open(path, os.O_WRONLY))
    elif not path.exists():  # opening a pipe would wait for its reader, and closing it would end it
        target = os.path.realpath(path)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(target)
