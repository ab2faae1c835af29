"""Activations between the stages of a pipeline."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.channel import Channel
from mlxdist.runtime.native import bridge
from mlxdist.runtime.point_to_point import recv, send

from ..sharding.plan.parameters import dtype_name
from .layers import Boundary

__all__ = ["GradientTransfer", "Transfer"]


class Transfer(Channel):
    """What passes from each stage to the next. :func:`pipeline_parallel` has agreed on shapes and dtypes, so a message
    has no more than its elements.

    A receive is an operation of MLX: one that is started early (``mx.async_eval``) arrives while this rank computes,
    into memory of its own. Sends, receives and results have a stream each, so that one that waits for another stage
    delays none of the others.
    """

    incoming = mx.new_thread_local_stream(mx.cpu)
    results = mx.new_thread_local_stream(mx.cpu)

    def send(
        self, arrays: Sequence[mx.array], to: int, boundary: Boundary, after: Sequence[mx.array] = ()
    ) -> list[mx.array]:
        """Sends what passes a boundary. Evaluating what it returns sends it, and computes ``after`` before.

        Raises:
            InvalidArgument: an array has not the shape and dtype that were agreed.
        """
        for passed, x in zip(boundary, arrays, strict=True):
            if x.shape[2:] != passed.shape[1:] or x.dtype != passed.dtype:
                raise InvalidArgument(
                    f"a stage sends {dtype_name(x)} of shape {x.shape}, but {passed} was agreed when the pipeline was "
                    "made; change dtypes and shapes of the model before pipeline_parallel"
                )
        sent: list[mx.array] = list(after)
        for x in arrays:
            x = mx.depends([x], sent)[0] if sent else x
            sent.append(send(x, to, group=self.group, stream=self.stream))
        return sent[len(after) :]

    def recv(
        self, boundary: Boundary, batch: int, length: int, src: int, after: Sequence[mx.array] = ()
    ) -> list[mx.array]:
        """What :meth:`send` sends there, each of shape (batch, length, ...), once ``after`` is computed."""
        received: list[mx.array] = list(after)
        for passed in boundary:
            token = mx.depends([received[-1]], received[:-1])[0] if received else mx.zeros(())
            shape = (batch, length, *passed.shape[1:])
            x: Any = recv(shape, passed.dtype, src, token=token, group=self.group, stream=self.incoming)
            received.append(x)
        return received[len(after) :]

    def broadcast(self, x: mx.array, root: int, call: int) -> mx.array:
        """``x`` of a stage on all stages. Ranks on which MLX evaluates the results of several calls in other orders
        raise Mismatch, by their number ``call``."""
        result: mx.array = bridge.broadcast(x, self.group.connection, root, self.results, label=call)
        return result


class GradientTransfer(Transfer):
    """The gradients of what passes, from each stage to the one before: another order of messages, so another group."""

    stream = mx.new_thread_local_stream(mx.cpu)
    incoming = mx.new_thread_local_stream(mx.cpu)
