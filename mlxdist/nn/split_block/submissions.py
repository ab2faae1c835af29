"""How often a graph is handed to MLX to be carried out, and how often a segment of a layer is traced.

On a GPU every `mx.eval` and `mx.async_eval` ends in the commit of a command buffer, and a collective, which runs on the
CPU, starts once that has run: what a layer costs besides its arithmetic is the number of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.runtime.cuda import computes_on_cuda

from ..interception import become, with_result
from ..tensor_parallel.linear_layers import ROW_SHARDED

__all__ = ["Submissions", "submissions", "submit", "submit_sums", "traced"]


@dataclass
class Submissions:
    """``submitted``: calls of `mx.eval` and `mx.async_eval`, of all callers. ``traces``: segments compiled again."""

    submitted: int = 0
    traces: int = 0


_counters: list[Submissions] = []
_lock = threading.Lock()
_evaluate = {name: getattr(mx, name) for name in ("eval", "async_eval")}


@contextmanager
def submissions() -> Iterator[Submissions]:
    """Counts while it is open: ``with submissions() as count: y = block(x, cache=cache)``, then ``count.submitted``.

    It counts the calls of all threads and of all callers through ``mlx.core``, such as mlx-lm. Evaluation without a
    call (a conversion to NumPy, ``item()``) is not counted. It is for tests and measurements: meanwhile the two
    functions of ``mlx.core`` are replaced by ones that count.
    """
    count = Submissions()
    with _lock:
        if not _counters:
            for name, function in _evaluate.items():
                setattr(mx, name, _counting(function))
        _counters.append(count)
    try:
        yield count
    finally:
        with _lock:
            _counters[:] = [counter for counter in _counters if counter is not count]
            if not _counters:
                for name, function in _evaluate.items():
                    setattr(mx, name, function)


def traced() -> None:
    """Called by the body of a compiled segment, which runs only while it is traced."""
    for count in _counters:
        count.traces += 1


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(*arrays: Any) -> Any:
        for count in _counters:
            count.submitted += 1
        return function(*arrays)

    return evaluate


def submit(array: mx.array) -> None:
    """Hands the graph of ``array`` to MLX.

    MLX's CUDA backend (0.32.4) computes it at once: there a graph that is submitted while the collective of another one
    runs can wait for ever. The thread that signals the collective's end frees an earlier event, which waits for the
    GPU, and the GPU waits for that signal.
    """
    if computes_on_cuda():
        mx.eval(array)
    else:
        mx.async_eval(array)


def submit_sums(model: nn.Module) -> None:
    """Changes the modules of ``model`` that add up over the ranks."""
    for module in model.modules():
        adds_up = isinstance(module, ROW_SHARDED) or type(module).__name__.startswith("Summed")
        if adds_up or getattr(module, "sharding_group", None) is not None:
            kind: Any = type(module)
            become(module, with_result(kind, _submitted, f"Submitting{kind.__name__}"))


def _submitted(module: nn.Module, result: Any) -> Any:
    submit(result)
    return result
