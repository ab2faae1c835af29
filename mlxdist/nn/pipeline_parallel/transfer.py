"""Activations between the stages of a pipeline."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.channel import Channel
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.ordering import Order

from ..layout.modules import dtype_name
from .layers import Boundary, Passed

__all__ = ["GradientTransfer", "Transfer"]


class Transfer(Channel):
    """The messages from each stage to the next. :func:`pipeline_parallel` has agreed on shapes and dtypes, so a message
    has no more than its elements.

    A receive is an operation of MLX: one that is started early (``mx.async_eval``) arrives while this rank computes,
    into memory of its own. Sends, receives and results have a stream each, so that one that waits for another stage
    delays none of the others.
    """

    incoming = mx.new_thread_local_stream(mx.cpu)
    results = mx.new_thread_local_stream(mx.cpu)

    def send(
        self,
        arrays: Sequence[mx.array],
        to: int,
        boundary: Boundary,
        order: Order | None = None,
        *after: mx.array,
        inputs: Sequence[mx.array] = (),
    ) -> list[mx.array]:
        """Sends what passes a boundary. Evaluating what it returns sends it: one array after the other, behind what
        comes before in ``order``, and when ``after`` is computed. It raises Mismatch on both ranks if their ``inputs``
        of the model differ: a hash of them goes with each array.

        Raises:
            InvalidArgument: an array has not the shape and dtype that were agreed.
        """
        for passed, x in zip(boundary, arrays, strict=True):
            if x.shape[2:] != passed.shape[1:] or x.dtype != passed.dtype:
                raise InvalidArgument(
                    f"a stage sends {dtype_name(x)} of shape {x.shape}, but {passed} was agreed when the pipeline was "
                    "made; change dtypes and shapes of the model before pipeline_parallel"
                )
        order = order or Order(self.stream)

        def leave(x: mx.array) -> mx.array:
            sent: mx.array = bridge.send(x, engine_of(self.group).connection, to, self.stream, equal=list(inputs))
            return sent

        return [order.carry_out(leave, x, *after) for x in arrays]

    def recv(
        self,
        boundary: Boundary,
        batch: int,
        length: int,
        src: int,
        order: Order | None = None,
        *after: mx.array,
        inputs: Sequence[mx.array] = (),
    ) -> list[mx.array]:
        """Receives what :meth:`send` sends on ``src``: arrays of shape (batch, length, ...), in an order as there."""
        order = order or Order(self.incoming)

        def arrive(passed: Passed, token: mx.array) -> mx.array:
            shape, connection = [batch, length, *passed.shape[1:]], engine_of(self.group).connection
            received: mx.array = bridge.recv(
                token, connection, src, shape, passed.dtype, self.incoming, equal=list(inputs)
            )
            return received

        return [order.carry_out(partial(arrive, passed), mx.array(0.0), *after) for passed in boundary]

    def broadcast(self, x: mx.array, root: int, call: int) -> mx.array:
        """``x`` of a stage on all stages. Ranks on which MLX evaluates the results of several calls in other orders
        raise Mismatch, by their number ``call``."""
        result: mx.array = bridge.broadcast(x, engine_of(self.group).connection, root, self.results, structure=call)
        return result


class GradientTransfer(Transfer):
    """The gradients of what passes, from each stage to the one before: another order of messages, so another group."""

    stream = mx.new_thread_local_stream(mx.cpu)
    incoming = mx.new_thread_local_stream(mx.cpu)
