"""A progress bar of bytes."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

__all__ = ["byte_progress"]


def byte_progress(console: Console, *, shown: bool = True) -> Progress:
    """A bar of the bytes of each task on a terminal, of which nothing stays; nothing elsewhere, or unless ``shown``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not shown or not console.is_terminal)
