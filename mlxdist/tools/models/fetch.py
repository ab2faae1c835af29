"""A model from Hugging Face's hub into the local cache of this host, by huggingface_hub."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.disk_space import require_room
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.model_directory import hub_directory
from mlxdist.base.validation import read_bounded

from .transfer import beginnings, write_lock

__all__ = ["fetch"]

_UNCHECKED = ".mlxdist-unchecked"  # there while a download is not checked; the blobs that were there before it
_MAX_NAMES_BYTES = 2**20


def fetch(model: str, on_progress: Callable[[str, int, int], Any]) -> Path:
    """Downloads what mlx-lm reads of a model. Of a download that was interrupted, whole files are kept.

    Where the hub does not answer, or HF_HUB_OFFLINE is set, a complete model in the cache is enough.

    Args:
        model: its name on the hub.
        on_progress: called with the name of the model and with numbers of bytes: those done, those of all.

    Returns:
        The directory in the cache.

    Raises:
        InvalidArgument: there is no huggingface_hub here; or the model cannot be downloaded, and is not in the cache.
        ResourceError: the disk has no room for it, a file has arrived damaged, or another pull writes there, too.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns when there is no PyTorch
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
        from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS
    except ImportError as error:
        raise InvalidArgument(f"mlxdist pull needs mlx-lm ({error}); pip install 'mlxdist[lm]'") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its errors are raised as well

    class Bar(tqdm):
        """A progress bar that reports to ``on_progress`` and draws nothing."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"file": nowhere, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                on_progress(f"downloading {model}", int(self.n), int(self.total))
            return shown

    with open(os.devnull, "w") as nowhere:
        try:
            directory = hub_directory(model)
            sizes = _sizes_to_download(model, DEFAULT_ALLOW_PATTERNS, Bar)
            require_room(directory, sum(sizes), model)
            with _checked(directory) if sizes or (directory / _UNCHECKED).exists() else nullcontext():
                return Path(snapshot_download(model, allow_patterns=DEFAULT_ALLOW_PATTERNS, tqdm_class=Bar))
        except ResourceError:
            raise
        except Exception as error:  # of the hub, of HTTP, of the cache: there are many kinds
            text = " ".join(str(error).split())
            raise InvalidArgument(f"{model} cannot be fetched from the Hugging Face Hub: {text}") from error


@contextmanager
def _checked(directory: Path) -> Iterator[None]:
    """Locks the directory, and checks what a download adds and what one has added whose check was interrupted.

    Raises:
        ResourceError: some of it is damaged, and removed; or another pull writes there.
    """
    note = directory / _UNCHECKED
    with write_lock(directory):
        if note.exists():
            before = set(read_bounded(note, _MAX_NAMES_BYTES).decode().split())
        else:
            before = {blob.name for blob in _blobs(directory)}
            replace_file(note, "\n".join(before), 0o644)
        unchecked = True
        try:
            yield
            _verify(_others(directory, before))
            unchecked = False
        finally:
            if not (unchecked and _others(directory, before)):  # else the next pull would take them for right
                note.unlink()


def _others(directory: Path, names: set[str]) -> list[Path]:
    return [blob for blob in _blobs(directory) if blob.name not in names]


def _blobs(directory: Path) -> list[Path]:
    """The contents in the cache whose name is their SHA-256: those of large files."""
    return [path for path in (directory / "blobs").glob("*") if len(path.name) == 64]


def _verify(blobs: list[Path]) -> None:
    """Removes all contents whose SHA-256 is not their name, and raises ResourceError."""
    sizes = {blob: blob.stat().st_size for blob in blobs}
    damaged = [blob for blob, size in sizes.items() if beginnings(blob, [size])[size].hexdigest() != blob.name]
    for blob in damaged:  # the next pull takes what it finds for right
        blob.unlink()
    if damaged:
        raise ResourceError(
            f"{damaged[0]} has arrived damaged"
            + (f", and {len(damaged) - 1} more file{'s' * (len(damaged) > 2)}" if len(damaged) > 1 else "")
            + ": its SHA-256 is not that of the hub; pull the model again"
        )


def _sizes_to_download(model: str, patterns: list[str], bar: type) -> list[int]:
    """The sizes of the files that are not in the cache; none where the hub does not answer."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        files = snapshot_download(model, allow_patterns=patterns, tqdm_class=bar, dry_run=True)
    except DryRunError:
        return []
    return [file.file_size or 0 for file in files if not file.is_cached]
