"""``MLXDIST_SYNC=1``: operations on ``mx.array`` are evaluated where they are called, so that errors are raised there.

All of them are made by functions of the bridge or of ``mx.distributed``, which are replaced in these modules. Without
the variable nothing is replaced, and nothing costs time. The gradients of operations are made by MLX and stay lazy.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .native import bridge

__all__ = ["OF_BRIDGE", "OF_MLX", "evaluate_operations"]

# Not its "recv", which has a token for a gradient: the stages of a pipeline build some before they send.
OF_BRIDGE = (
    "all_gather", "all_reduce", "all_to_all", "all_to_all_v", "broadcast", "gather", "reduce", "reduce_scatter",
    "require_equal", "scatter", "send", "sendrecv",
)  # fmt: skip
OF_MLX = ("all_gather", "all_max", "all_min", "all_sum", "recv", "recv_like", "send", "sum_scatter")


@functools.cache  # mlxdist.init() may be called again after finalize()
def evaluate_operations() -> None:
    """From now on, evaluates operations of all groups where they are called, also those of ``mx.distributed``."""
    for module, names in ((bridge, OF_BRIDGE), (mx.distributed, OF_MLX)):
        for name in names:
            setattr(module, name, _evaluated(getattr(module, name), _HOW.get(name, _evaluate)))


def _evaluated(build: Callable[..., mx.array], evaluate: Callable[[mx.array], None]) -> Callable[..., mx.array]:
    @functools.wraps(build)
    def operation(*arguments: Any, **keywords: Any) -> mx.array:
        result = build(*arguments, **keywords)
        evaluate(result)
        return result

    return operation


def _start(sent: mx.array) -> None:
    """Starts a message, and does not wait for its receiver: that rank may send one to this rank first."""
    if not bridge.traces():  # MLX starts nothing there
        mx.async_eval(sent)


def _receive(received: mx.array) -> None:
    """Evaluates a message where its sender has started it, too."""
    if not bridge.traces():
        mx.eval(received)


def _evaluate(result: mx.array) -> None:
    if not bridge.traces():
        mx.eval(result)
    elif bridge.is_traced(result):
        # Inside mx.grad it has a value. Inside mx.compile and mx.vmap its arguments have none; what depends on none of
        # them would become a constant of the compiled function, and is not traced.
        try:
            mx.eval(result)
        except ValueError as error:
            if "function transformations" not in str(error):
                raise


_HOW = {"send": _start, "recv": _receive, "recv_like": _receive}
