"""Which model a cache is of: what senders and receivers compare."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..base.errors import InvalidArgument
from ..nn.layout.modules import source_of

__all__ = ["described_model", "require_same_model"]

_SAMPLE = 4  # elements of each parameter


def described_model(model: Any) -> dict[str, Any]:
    """A model for JSON: its configuration, and a hash of what this rank holds of it, by shapes and some elements.

    Raises:
        InvalidArgument: it is no model.
    """
    if model is None:
        raise InvalidArgument(
            "kv: without model= no rank can see that the cache is one of its model; pass the model, on all ranks"
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"kv: model must be an mlx.nn.Module, not {type(model).__name__}")
    arrays = sorted(dict(tree_flatten(model.parameters())).items())
    sample = [x.reshape(-1)[:_SAMPLE].astype(mx.float32) for _, x in arrays]
    held = blake2b(repr([(path, x.shape) for path, x in arrays]).encode(), digest_size=16)
    held.update(np.array(mx.concatenate(sample) if sample else mx.zeros(0)).tobytes())
    arguments = {name: repr(value) for name, value in getattr(getattr(model, "args", None), "__dict__", {}).items()}
    return {"arguments": {"file": source_of(model)} | arguments, "part": held.hexdigest()}


def require_same_model(theirs: Sequence[Any], own: dict[str, Any], ranks: Sequence[int]) -> None:
    """Raises an InvalidArgument that names what differs between the configurations of ``ranks`` and this rank's."""
    for rank, one in zip(ranks, theirs, strict=True):
        for name, value in own["arguments"].items():
            if (other := one["arguments"].get(name)) != value:
                raise InvalidArgument(
                    f"kv.recv: rank {rank} sends the cache of another model: its {name} is {other!s:.100}, and here "
                    f"{value:.100}"
                )
