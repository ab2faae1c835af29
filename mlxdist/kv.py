"""Prompt caches of mlx-lm from one rank to another, so that some ranks compute prompts and others generate.

kv.send(cache, 1)          # rank 0, after model(prompt, cache=cache)
cache = kv.recv(0)         # rank 1
"""

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
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
    description = [[type(layer).__name__, _describe(state)] for layer, state in zip(cache, layers, strict=True)]
    _check_peer(group, "dst", dst)
    text = np.frombuffer(json.dumps(description).encode(), np.uint8)
    send_array(np.array([text.size], np.int64), dst, group=group)
    send_array(text, dst, group=group)
    sent: list[mx.array] = []
    for state in layers:
        for x in _arrays(state):
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
    _check_peer(group, "src", src)
    (size,) = np.asarray(recv_array([1], np.int64, src, group=group)).tolist()
    if not 0 < size <= MAX_DESCRIPTION_BYTES:
        raise Mismatch(f"kv.recv: rank {src} describes its cache in {size} bytes; {MAX_DESCRIPTION_BYTES} are the most")
    text = np.asarray(recv_array([size], np.uint8, src, group=group)).tobytes()
    received: list[mx.array] = []

    def array(shape: list[int], dtype: str) -> mx.array:
        if 0 in shape:
            return mx.zeros(shape, DTYPES[dtype])
        x: Any = recv_array(shape, DTYPES[dtype], src, group=group, stream=_stream)
        received.append(x)
        mx.async_eval(x)
        return x

    try:
        layers = [_class_of(name).from_state(_restore(state, array)) for name, state in json.loads(text)]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Mismatch(f"kv.recv: what rank {src} sends is no prompt cache of this mlx-lm: {error!r}") from error
    mx.eval(received)
    return layers


def _check_peer(group: Group, name: str, peer: int) -> None:
    if peer not in range(group.size()) or peer == group.rank():
        raise InvalidArgument(f"{name} must be another rank of the group, which has {group.size()}, not {peer!r}")


def _class_of(name: str) -> Any:
    found = getattr(caches_of_mlx_lm, name, None)
    if not (isinstance(found, type) and issubclass(found, caches_of_mlx_lm._BaseCache)):
        raise ValueError(f"{name!r} is no cache of mlx_lm.models.cache")
    return found


def _state_of(layer: Any, number: int) -> Any:
    try:
        if _class_of(type(layer).__name__) is not type(layer):
            raise ValueError("another class has that name")
    except ValueError as error:
        raise InvalidArgument(f"the cache of layer {number} is {type(layer).__name__}: {error}") from error
    if isinstance(layer, KVCache | QuantizedKVCache) and layer.keys is not None:
        return _tokens(layer.state, layer.offset)
    return layer.state


def _tokens(state: Any, length: int) -> Any:
    """``state`` with the first ``length`` tokens of each of its arrays, which have room for more."""
    if isinstance(state, list | tuple):
        return [_tokens(item, length) for item in state]
    return state[..., :length, :] if isinstance(state, mx.array) else state


def _arrays(state: Any) -> list[mx.array]:
    """Those with elements, in the order in which :func:`_restore` meets them."""
    if isinstance(state, list | tuple):
        return [x for item in state for x in _arrays(item)]
    return [state] if isinstance(state, mx.array) and state.size else []


def _describe(state: Any) -> Any:
    """``state`` for JSON: a dictionary stands for an array."""
    if isinstance(state, list | tuple):
        return [_describe(item) for item in state]
    if isinstance(state, mx.array):
        return {"shape": state.shape, "dtype": dtype_name(state)}
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise InvalidArgument(f"a cache whose state has a {type(state).__name__} in it cannot be sent")


def _restore(described: Any, array: Any) -> Any:
    if isinstance(described, list):
        return [_restore(item, array) for item in described]
    return array(**described) if isinstance(described, dict) else described
