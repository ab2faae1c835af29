"""The collectives of one call in one order on all ranks, forward and backward.

MLX evaluates what does not depend on each other in an order that depends on the whole graph, and leaves out what no
result needs. Graphs of ranks with other tokens differ: there, weights that no token came to have a gradient that
depends on nothing. So neither the order of collectives nor which of them run may be left to what the data flow implies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxdist.runtime.native import bridge

__all__ = ["Stages", "chained", "is_traced"]

Arrays = list[mx.array]


class Stages:
    """Steps of one call that communicate. Each waits for the one before, backward for the one behind it.

    Where a gradient may be asked for, a scalar goes from step to step, and its cotangent comes back: what lies between
    two steps may drop a dependency, as MLX's operations may on arrays without elements. Backward, a step also waits for
    its own forward part, and the gradients that leave the first step wait for all steps. So whichever of them is
    evaluated, the same collectives run, and the forward ones before.
    """

    def __init__(self) -> None:
        self._token: mx.array | None = None
        self._before: Arrays = []  # what the next step waits for

    def run(
        self,
        forward: Callable[[Arrays], Arrays] | None,
        backward: Callable[[Arrays], Arrays] | None,
        moved: Sequence[mx.array],
        passed: Sequence[mx.array] = (),
    ) -> Arrays:
        """The results of ``forward(moved)``, with ``backward`` for their gradient, and behind them ``passed``.

        Both functions have as many results as arguments, and collectives in a fixed order (:func:`chained`); ``None``
        leaves what is moved as it is. ``passed`` comes out as it is, and its gradient waits too; one that nothing needs
        is not computed.
        """
        if self._token is None and not is_traced(*moved, *passed):
            return [*self._forward(forward, list(moved), passed), *passed]
        count = len(moved)

        def run(arrays: Arrays) -> Arrays:
            token, taken, rest = arrays[0], arrays[1 : count + 1], arrays[count + 1 :]
            return [token, *self._forward(forward, taken, rest), *rest]

        def gradient(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
            token, given, rest = cotangents[0], cotangents[1 : count + 1], cotangents[count + 1 :]
            done = [token]
            if given:
                given = mx.depends(given, [token, outputs[0]])
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
        """``forward`` behind the step before, and behind what is passed: that may come from another call's steps."""
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
