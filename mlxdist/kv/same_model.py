"""The description of a cache's model, which senders and receivers compare."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..base.errors import InvalidArgument
from ..nn.layout.modules import parameters, source_of

__all__ = ["described_model", "require_same_model"]

_SAMPLE = 4  # elements of each parameter


class _Known(NamedTuple):
    """The hash of a rank's part of a model, kept while its arrays stay: it takes as long as sending a small cache."""

    model: ref[nn.Module]
    held: list[ref[mx.array]]
    part: str

    def is_of(self, model: nn.Module, arrays: list[mx.array]) -> bool:
        is_alike = self.model() is model and len(self.held) == len(arrays)
        return is_alike and all(held() is array for held, array in zip(self.held, arrays))


_known: dict[int, _Known] = {}


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
    arguments = {name: repr(value) for name, value in getattr(getattr(model, "args", None), "__dict__", {}).items()}
    return {"arguments": {"file": source_of(model)} | arguments, "part": _part(model)}


def _part(model: nn.Module) -> str:
    """The hash of this rank's part, computed once for the same arrays: new values in them do not change the shard."""
    arrays = list(_arrays(model))
    known = _known.get(id(model))
    if known is None or not known.is_of(model, arrays):
        forget = lambda _, key=id(model): _known.pop(key, None)
        known = _known[id(model)] = _Known(ref(model, forget), [ref(array) for array in arrays], _hash(model))
    return known.part


def _arrays(tree: Any) -> Iterator[mx.array]:
    """All arrays in a module, dict or list: as tree_flatten, in a sixth of its time."""
    for node in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(node, mx.array):
            yield node
        elif isinstance(node, dict | list | tuple):
            yield from _arrays(node)


def _hash(model: nn.Module) -> str:
    # Shapes and a few elements tell models and shards apart. Hashing all elements would read the whole model.
    arrays = sorted(parameters(model).items())
    sample = [x.reshape(-1)[:_SAMPLE].astype(mx.float32) for _, x in arrays]
    held = blake2b(repr([(path, x.shape) for path, x in arrays]).encode(), digest_size=16)
    held.update(np.array(mx.concatenate(sample) if sample else mx.zeros(0)).tobytes())
    return held.hexdigest()


def require_same_model(theirs: Sequence[Any], own: dict[str, Any], ranks: Sequence[int]) -> None:
    """Raises an InvalidArgument that names what differs between the configurations of ``ranks`` and this rank's."""
    for rank, one in zip(ranks, theirs, strict=True):
        for name, value in own["arguments"].items():
            if (other := one["arguments"].get(name)) != value:
                raise InvalidArgument(
                    f"kv.recv: rank {rank} sends the cache of another model: its {name} is {other!s:.100}, and here "
                    f"{value:.100}"
                )
