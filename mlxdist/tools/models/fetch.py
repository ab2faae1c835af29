"""A model from Hugging Face's hub into the local cache of this host, by huggingface_hub."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxdist.base.disk_space import require_room
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.model_directory import hub_directory

from .transfer import beginnings

__all__ = ["fetch"]


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
        ResourceError: the disk has no room for it, or a file has arrived damaged.
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
            _require_room(model, DEFAULT_ALLOW_PATTERNS, Bar)
            before = set(_blobs(model))
            found = Path(snapshot_download(model, allow_patterns=DEFAULT_ALLOW_PATTERNS, tqdm_class=Bar))
            _verify([blob for blob in _blobs(model) if blob not in before])
            return found
        except ResourceError:
            raise
        except Exception as error:  # of the hub, of HTTP, of the cache: there are many kinds
            text = " ".join(str(error).split())
            raise InvalidArgument(f"{model} cannot be fetched from the Hugging Face Hub: {text}") from error


def _blobs(model: str) -> list[Path]:
    """The contents in the cache whose name is their SHA-256: those of large files."""
    return [path for path in (hub_directory(model) / "blobs").glob("*") if len(path.name) == 64]


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


def _require_room(model: str, patterns: list[str], bar: type) -> None:
    """Raises ResourceError: the disk of the cache has no room for what a download will write."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        files = snapshot_download(model, allow_patterns=patterns, tqdm_class=bar, dry_run=True)
    except DryRunError:  # the hub does not answer; what is in the cache needs no room
        return
    wanted = sum(file.file_size or 0 for file in files if not file.is_cached)
    require_room(hub_directory(model), wanted, model)
