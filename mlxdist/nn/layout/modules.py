"""The modules and parameters of a model by their paths."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

__all__ = ["children", "dtype_name", "join_path", "own_arrays", "parameters", "source_of"]


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """All parameters by path; nothing is evaluated."""
    return dict(tree_flatten(model.parameters()))


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module, also in its lists and dicts, by path."""
    found: Any = tree_flatten(dict(module), is_leaf=lambda value: isinstance(value, nn.Module))
    return ((path, value) for path, value in found if isinstance(value, nn.Module))


def own_arrays(layer: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """The parameters that a module has itself."""
    return ((name, value) for name, value in layer.items() if isinstance(value, mx.array) and not name.startswith("_"))


def join_path(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def source_of(module: nn.Module) -> str:
    """The name of the file of a module's class."""
    return type(module).__module__.rpartition(".")[2]


def dtype_name(dtype: mx.array | mx.Dtype) -> str:
    """The name of a dtype, or of an array's: "float32"."""
    return str(dtype.dtype if isinstance(dtype, mx.array) else dtype).removeprefix("mlx.core.")
