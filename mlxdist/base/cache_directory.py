"""The directory of this user for files that mlxdist can make again."""

import os
import sys
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """The directory, which may not exist yet. Raises RuntimeError: this user has no home directory."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxdist"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "mlxdist"
