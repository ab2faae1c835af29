"""Messages between two ranks: descriptions as bounded JSON, and arrays one after the other."""

import json
from typing import Any

import mlx.core as mx
import numpy as np

from ..base.errors import Mismatch
from ..base.json_reader import parse_json
from ..runtime.group.group import Group
from ..runtime.operations.point_to_point import recv as recv_array
from ..runtime.operations.point_to_point import send as send_array
from .states import DTYPES

__all__ = ["INVALID", "Receives", "Sends", "recv_json", "send_json"]

# A description has a few hundred bytes for each layer.
MAX_DESCRIPTION_BYTES = 1 << 24
# The exceptions that reading a malformed message raises.
INVALID = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

# Not the stream of the model: on a CPU that one would send a layer only after the layers queued behind it.
_stream = mx.new_thread_local_stream(mx.cpu)


def send_json(value: Any, dst: int, group: Group) -> None:
    """Sends a value of JSON to rank ``dst``, which calls :func:`recv_json`."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    send_array(np.array([text.size], np.int64), dst, group=group)
    send_array(text, dst, group=group)


def recv_json(src: int, group: Group) -> Any:
    """The value of JSON that rank ``src`` sends.

    Raises:
        Mismatch: it sends something else.
    """
    (size,) = np.asarray(recv_array([1], np.int64, src, group=group)).tolist()
    if not 0 < size <= MAX_DESCRIPTION_BYTES:
        raise Mismatch(f"kv: rank {src} describes its cache in {size} bytes; {MAX_DESCRIPTION_BYTES} are the most")
    text = np.asarray(recv_array([size], np.uint8, src, group=group)).tobytes()
    try:
        return parse_json(text)
    except INVALID as error:
        raise Mismatch(f"kv: what rank {src} sends is no prompt cache of this mlx-lm: {error!r}") from error


class Sends:
    """Arrays on their way, in the order in which they were added: each leaves once it is computed."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.started: list[mx.array] = []

    def add(self, x: mx.array, dst: int) -> None:
        """Sends an array of any shape and dtype to rank ``dst``. An array without elements is only computed: it needs
        no message, but in the cache of another stage's layer it depends on the messages of that stage."""
        self.compute(send_array(x, dst, group=self.group, stream=_stream) if x.size else x)

    def compute(self, x: mx.array) -> None:
        """Starts ``x``, which other ranks wait for. Arrays start one by one: in a list, MLX chooses the order."""
        mx.async_eval(x)
        self.started.append(x)

    def wait(self) -> None:
        """Returns when all have left."""
        mx.eval(self.started)


class Receives:
    """Arrays that come in the order in which they were added."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.started: list[mx.array] = []

    def add(self, shape: list[int], dtype: str, src: int) -> mx.array:
        """The array that :meth:`Sends.add` sends on rank ``src``."""
        if 0 in shape:
            return mx.zeros(shape, DTYPES[dtype])
        x: Any = recv_array(shape, DTYPES[dtype], src, group=self.group, stream=_stream)
        mx.async_eval(x)
        self.started.append(x)
        return x

    def wait(self) -> None:
        """Returns when all have come."""
        mx.eval(self.started)
