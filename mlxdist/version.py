"""The version, apart from the package's other modules so that the launcher can read it without importing MLX."""

import importlib.util
import shlex
import sys

__all__ = ["HOW_TO_BUILD", "__version__", "install_command"]

__version__ = "0.1.0"

# For messages about a compiled half that is missing or another version's.
HOW_TO_BUILD = (
    "in mlxdist's source directory, `make setup`, or `pip install --no-build-isolation --no-deps --force-reinstall .`"
)


def install_command(*requirements: str) -> str:
    """What to type to install packages into this Python, which has no pip where uv has made its environment."""
    pip = [sys.executable, "-m", "pip", "install"]
    uv = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*(pip if importlib.util.find_spec("pip") else uv), *requirements])
