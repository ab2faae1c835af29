"""Operations in one order on all ranks, whatever their graphs are.

MLX evaluates what does not depend on each other in an order that depends on the whole graph, and leaves out what no
result needs. The graphs of ranks may differ: by the shapes of their batches, or where no token comes to some weights,
whose gradient then depends on nothing. There, neither the order of operations nor which of them run may be left to what
the data flow implies. Where graphs are alike no :class:`Order` is needed: it lets nothing overlap that it orders.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..label import current_path, label_scope
from ..native import bridge

__all__ = ["Order", "chained", "is_traced"]

Arrays = list[mx.array]


class Order:
    """Operations that each wait for those before: of one call of a model, or of one kind of messages.

    A scalar, the token, passes through each of them. It keeps no result in memory, and what lies between two operations
    cannot drop the dependency, as MLX's operations may on arrays without elements.

    Args:
        stream: of the CPU, where the operations run. There the waiting is done, too: on the stream of what an operation
            takes, a Mac's GPU would wait for each message. ``None``: on that of what it takes.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self._token: mx.array | None = None
        self._before: Arrays = []  # what the next operation waits for

    def carry_out(self, operation: Callable[[mx.array], mx.array], x: mx.array, *after: mx.array) -> mx.array:
        """``operation(x)``, once the operations before it and ``after`` are computed.

        Its gradient is the operation's own, in no order. In a backward function of ``mx.custom_function``, MLX calls
        these in the same order on all ranks, and that is the order of their operations.
        """
        if self._stream is not None:
            x = mx.contiguous(x, stream=self._stream)  # copies nothing: depends() works on the stream of its argument
        if before := [*self._before, *after]:
            (x,) = mx.depends([x], before)
        # Both come from one operation, on the stream of the result: what evaluates that evaluates the token, which then
        # keeps nothing in memory.
        result, token = mx.depends([operation(x), mx.array(0.0)], self._before)
        self._before = [token]
        return result

    def run(
        self,
        forward: Callable[[Arrays], Arrays] | None,
        backward: Callable[[Arrays], Arrays] | None,
        moved: Sequence[mx.array],
        passed: Sequence[mx.array] = (),
    ) -> Arrays:
        """The results of ``forward(moved)``, with ``backward`` for their gradient, and behind them ``passed``.

        Where a gradient may be asked for, the cotangent of the token comes back: backward, each run waits for the one
        behind it and for its own forward part, and the gradients that leave the first run wait for all. So whichever
        of them is evaluated, the same operations run, and the forward ones before.

        Both functions have as many results as arguments, and operations in a fixed order (:func:`chained`); ``None``
        leaves what is moved as it is. ``passed`` comes out as it is, and its gradient waits too; one that nothing needs
        is not computed.
        """
        if self._token is None and not is_traced(*moved, *passed):
            return [*self._forward(forward, list(moved), passed), *passed]
        count, path = len(moved), current_path()

        def run(arrays: Arrays) -> Arrays:
            token, taken, rest = arrays[0], arrays[1 : count + 1], arrays[count + 1 :]
            return [token, *self._forward(forward, taken, rest), *rest]

        def gradient(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
            token, given, rest = cotangents[0], cotangents[1 : count + 1], cotangents[count + 1 :]
            done = [token]
            if given:
                given = mx.depends(given, [token, outputs[0]])
                with label_scope(path and f"{path} backward"):
                    done = given if backward is None else backward(given)
                done = mx.depends(done, done)
            token = mx.depends(token, done)
            return [token, *(done if given else []), *(mx.depends(one, [token]) for one in rest)]

        step: Any = mx.custom_function(run)
        step.vjp(gradient)
        token = mx.zeros(()) if self._token is None else self._token
        token, *results = step([token, *moved, *passed])
        self._token, self._before = token, [token]
        return results

    def _forward(
        self, forward: Callable[[Arrays], Arrays] | None, arrays: Arrays, passed: Sequence[mx.array]
    ) -> Arrays:
        """``forward`` behind the run before, and behind what is passed: that may come from another call's runs."""
        if forward is None or not arrays:
            return arrays
        before = [*self._before, *passed]
        self._before = forward(mx.depends(arrays, before) if before else arrays)
        return self._before


def is_traced(*arrays: mx.array) -> bool:
    """Whether MLX may ask for a gradient of what is computed from one of them; also inside ``mx.compile``."""
    return any(bridge.is_traced(array) for array in arrays)


def chained(*functions: Callable[[mx.array], mx.array]) -> Callable[[Arrays], Arrays]:
    """A function of arrays that applies each function to its array, one after the other; the last one to the rest."""

    def apply(arrays: Arrays) -> Arrays:
        done: Arrays = []
        for number, array in enumerate(arrays):
            function = functions[min(number, len(functions) - 1)]
            done.append(function(mx.depends(array, done[-1]) if done else array))
        return done

    return apply
