"""Prompt caches of mlx-lm from one rank to another, so that some ranks compute prompts and others generate.

Rank 0 calls ``kv.send(cache, 1)`` after ``model(prompt, cache=cache)``, and rank 1 ``cache = kv.recv(0)``.
"""

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as caches_of_mlx_lm
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .base.errors import InvalidArgument, Mismatch
from .nn.sharding.plan.parameters import dtype_name
from .runtime.default_group import init
from .runtime.group import Group
from .runtime.point_to_point import recv as recv_array
from .runtime.point_to_point import send as send_array

__all__ = ["recv", "send"]

# A description has a few hundred bytes for each layer.
MAX_DESCRIPTION_BYTES = 1 << 24
DTYPES = {dtype_name(dtype): dtype for dtype in vars(mx).values() if isinstance(dtype, mx.Dtype)}
CACHES = {
    name: found
    for name, found in vars(caches_of_mlx_lm).items()
    if isinstance(found, type) and issubclass(found, caches_of_mlx_lm._BaseCache)
}

# Not that of the model: on a CPU it would send a layer after the ones behind it.
_stream = mx.new_thread_local_stream(mx.cpu)


def send(cache: Sequence[Any], dst: int, *, group: Group | None = None) -> None:
    """Sends a prompt cache to rank ``dst``, which must call :func:`recv`; returns when it has left.

    Each layer leaves once it is computed, while the next ones still are: call this before the cache is evaluated. What
    is sent has the dtypes, or the quantized form, of the cache, and of :class:`KVCache` and :class:`QuantizedKVCache`
    the tokens that are in it, not the room for more. The cache stays as it is.

    Args:
        cache: what ``mlx_lm.models.cache.make_prompt_cache`` makes, one for each layer.
        dst: the rank, in ``group``.
        group: default: all ranks.

    Raises:
        InvalidArgument: a layer has a cache that is not mlx-lm's, or ``dst`` is no other rank of the group.
    """
    group = init() if group is None else group
    layers = [_state_of(layer, number) for number, layer in enumerate(cache)]
    described = [tree_map(_described, state, is_leaf=_is_dict) for state in layers]
    description = [[type(layer).__name__, state] for layer, state in zip(cache, described, strict=True)]
    text = np.frombuffer(json.dumps(description).encode(), np.uint8)
    send_array(np.array([text.size], np.int64), dst, group=group)
    send_array(text, dst, group=group)
    leaves: Any = tree_flatten(layers)
    sent: list[mx.array] = []
    for _, x in leaves:
        if isinstance(x, mx.array) and x.size:
            sent.append(send_array(x, dst, group=group, stream=_stream))
            mx.async_eval(sent[-1])  # one by one: of a list MLX chooses the order
    mx.eval(sent)


def recv(src: int, *, group: Group | None = None) -> list[Any]:
    """The prompt cache that rank ``src`` sends with :func:`send`: a copy of its own, which is complete.

    Args:
        src: the rank, in ``group``.
        group: as for :func:`send`.

    Raises:
        InvalidArgument: ``src`` is no other rank of the group.
        Mismatch: what ``src`` sends is no prompt cache of mlx-lm, or of an mlx-lm with other classes.
    """
    group = init() if group is None else group
    (size,) = np.asarray(recv_array([1], np.int64, src, group=group)).tolist()
    if not 0 < size <= MAX_DESCRIPTION_BYTES:
        raise Mismatch(f"kv.recv: rank {src} describes its cache in {size} bytes; {MAX_DESCRIPTION_BYTES} are the most")
    text = np.asarray(recv_array([size], np.uint8, src, group=group)).tobytes()
    received: list[mx.array] = []

    def leaf(described: Any) -> Any:
        return array(**described) if _is_dict(described) else described

    def array(shape: list[int], dtype: str) -> mx.array:
        if 0 in shape:
            return mx.zeros(shape, DTYPES[dtype])
        x: Any = recv_array(shape, DTYPES[dtype], src, group=group, stream=_stream)
        received.append(x)
        mx.async_eval(x)
        return x

    try:
        layers = [CACHES[name].from_state(tree_map(leaf, state, is_leaf=_is_dict)) for name, state in json.loads(text)]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Mismatch(f"kv.recv: what rank {src} sends is no prompt cache of this mlx-lm: {error!r}") from error
    mx.eval(received)
    return layers


def _state_of(layer: Any, number: int) -> Any:
    name = type(layer).__name__
    if CACHES.get(name) is not type(layer):
        raise InvalidArgument(
            f"the cache of layer {number} is {name}: mlx_lm.models.cache has none, or another class has that name"
        )
    if isinstance(layer, KVCache | QuantizedKVCache):
        return tree_map(lambda x: x[..., : layer.offset, :] if isinstance(x, mx.array) else x, layer.state)
    return layer.state


def _described(leaf: Any) -> Any:
    """A leaf of a state for JSON: a dictionary stands for an array."""
    if isinstance(leaf, mx.array):
        return {"shape": leaf.shape, "dtype": dtype_name(leaf)}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise InvalidArgument(f"a cache whose state has a {type(leaf).__name__} in it cannot be sent")


def _is_dict(state: Any) -> bool:
    return isinstance(state, dict)
