"""The library that has the soft provider under the names of libibverbs, where it is installed."""

import importlib.util
import sys
from pathlib import Path

import pytest
from native_build import NATIVE

__all__ = ["LIBRARY", "MAP", "linux"]

_SUFFIX = "dylib" if sys.platform == "darwin" else "so"
LIBRARY = Path(importlib.util.find_spec("mlxdist._native").origin).parent / f"libsoftverbs.{_SUFFIX}"
MAP = NATIVE / "bindings" / "softverbs" / "softverbs.map"
linux = pytest.mark.skipif(sys.platform != "linux", reason="libibverbs is Linux's")
