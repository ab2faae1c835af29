"""Changes the outputs of a model where a loss calls it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxdist.nn.interception import with_methods

__all__ = ["outputs_through"]


@contextmanager
def outputs_through(model: nn.Module, change: Callable[[mx.array], mx.array]) -> Iterator[None]:
    """Within, each array that ``model(...)`` returns goes through ``change``."""

    def call(kind: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outputs = kind.__call__(self, *args, **kwargs)
        return tree_map(lambda leaf: change(leaf) if isinstance(leaf, mx.array) else leaf, outputs)

    with with_methods([model], __call__=call):
        yield
