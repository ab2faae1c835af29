"""Model folders of mlx-lm."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.safetensors_reader import MTP_FILE

__all__ = ["new_folder", "other_files", "require_no_folder", "write_model_folder"]

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def require_no_folder(target: Path) -> None:
    """Raises InvalidArgument: ``target`` is there already, and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument(f"{target} exists; remove it or name another one")


def other_files(base: Path) -> list[Path]:
    """All files of a model folder besides its weights: config, tokenizer."""
    return [file for file in base.iterdir() if file.is_file() and not file.name.endswith(_WEIGHTS)]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``target`` at the end of a ``with`` statement that raises nothing.

    Raises:
        OSError: ``target`` exists and is not empty, or cannot be written.
    """
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    # Next to the target and not in /tmp: only within one file system is a rename possible, and atomic.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.absolute().parent) as made:
        folder = Path(made, "model")
        folder.mkdir()
        yield folder
        folder.replace(target)


def write_model_folder(
    target: Path,
    model: nn.Module,
    files: Iterable[Path],
    config: dict[str, Any] | None = None,
    mtp: Mapping[str, mx.array] = {},
) -> None:
    """Writes the weights of a model, with copies of ``files``, and a config.json, if there is a new one; those of a
    head ``mtp`` into a file of their own, since mlx-lm would not load them.

    ``target`` is complete or not there. Raises OSError: it exists and is not empty, or cannot be written.
    """
    from mlx_lm.utils import save_config, save_model

    with new_folder(target) as folder:
        save_model(folder, model)
        for file in files:
            shutil.copy(file, folder)
        if mtp:
            mx.save_safetensors(str(folder / MTP_FILE), dict(mtp), metadata={"format": "mlx"})
        if config is not None:
            save_config(dict(config), folder / "config.json")
