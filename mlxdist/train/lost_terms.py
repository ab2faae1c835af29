"""Terms of a loss that ranks would not count once: stages of a pipeline, or those that have shards of parameters."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.mappings import with_gradients
from mlxdist.nn.pipeline_parallel import Stage
from mlxdist.nn.pipeline_parallel.stage import calls_of, parameters_of
from mlxdist.runtime.native import bridge

from .gradient_accumulation import MicroBatch
from .gradient_averaging import NAME, paths_of_shards, with_shards
from .model_outputs import outputs_through
from .stage_terms import collecting

__all__ = ["LostTerms", "check_shards"]

_RECEIVED, _RETURNED = "(what the stage before sends)", "(what the model returns)"


def check_shards(model: nn.Module, loss: Callable[[], mx.array]) -> None:
    """Checks that no term takes a shard as it is, in a loss that counts by this rank's share of the tokens.

    A module of :func:`fully_shard` computes with all ranks' parts, whose gradients are of all tokens then. A term that
    takes a part as it is, such as an L2 penalty, would count by the tokens of the rank that has it.

    Raises:
        InvalidArgument: the loss has such a term.
    """

    with ExitStack() as stack:
        for module in with_shards(model).values():
            stack.enter_context(module._unit.with_constants())
        reached = _reached(model, lambda _: loss(), [], lambda probe: nullcontext())
    _refuse_shards(reached, paths_of_shards(model))


def _refuse_shards(reached: Sequence[str], shards: Collection[str]) -> None:
    if found := [path for path in reached if path in shards]:
        raise InvalidArgument(
            f"{NAME}: a term of the loss is made of '{found[0]}' itself, of which this rank has a part, and would "
            "count by this rank's share of the tokens; return the loss without tokens, or take the weight decay of "
            "the optimizer"
        )


class LostTerms:
    """Checks a loss: walks its graph backward, and notes which parameters it reaches. Nothing is computed.

    ``loss_of``: returns the loss that is differentiated, from a result of fn; ``is_weighted``: whether it counts by the
    rank's share of the tokens.
    """

    def __init__(self, model: nn.Module, stage: Stage, loss_of: Callable[[Any], mx.array], is_weighted: bool) -> None:
        self._model, self._stage, self._loss_of = model, stage, loss_of
        self._shards = paths_of_shards(model) if is_weighted else set()

    def check(self, fn: Callable[..., Any], arguments: MicroBatch, shape: tuple[int, int]) -> None:
        """``fn(*arguments[0], **arguments[1])`` is the loss of a micro-batch of tokens of that shape.

        Raises:
            InvalidArgument: the loss has a term that depends on this stage otherwise than by what it sends; or a term
                of stage_loss is made of what the model returns, or of a parameter that another stage counts; or of
                a shard, and counts by tokens.
        """
        stage, call = self._stage, lambda: fn(*arguments[0], **arguments[1])
        calls, held_by = calls_of(stage), parameters_of(stage)
        for chunk, layers in enumerate(stage.chunks):
            part = chunk * stage.stages + stage.index
            hidden = [
                mx.zeros((*shape, *passed.shape[1:]), passed.dtype) for passed in calls.boundary(part) if layers.start
            ]
            is_last = part + 1 == len(stage.stage_plan.ranges)
            if not is_last or self._shards:
                reached = self._reached(partial(self._loss_alone, call, chunk), hidden)
                if is_last:
                    _refuse_shards(reached, self._shards)
                elif lost := [path for path in reached if path == _RECEIVED or not held_by.is_in_last_chunk(path)]:
                    raise InvalidArgument(
                        f"{NAME}: the loss depends on '{lost[0]}' of stage {stage.index} not only by what the model "
                        "returns, and the loss of the last stage would go without that term: add it by "
                        "train.stage_loss(model, term)"
                    )
            reached = self._reached(partial(self._terms_alone, call, chunk), [])
            if _RETURNED in reached:
                raise InvalidArgument(
                    f"{NAME}: a term of stage_loss is made of what the model returns, which only the last stage has; "
                    "add it to the loss itself"
                )
            _refuse_shards(reached, self._shards)
            if twice := [path for path in reached if path != _RETURNED and not held_by.counts(path, chunk)]:
                raise InvalidArgument(
                    f"{NAME}: a term of stage_loss depends on '{twice[0]}', which another stage counts, too; take "
                    "model.stage.trainable_parameters() in place of model.trainable_parameters()"
                )

    def _loss_alone(self, call: Callable[[], Any], chunk: int, hidden: Sequence[mx.array]) -> mx.array:
        """The loss with the model's outputs, and the sums of stage_loss, as constants."""
        with collecting(is_cut=True), outputs_through(self._model, mx.stop_gradient):
            value, _ = calls_of(self._stage).within(call, hidden or None, chunk)
        return self._loss_of(value)

    def _terms_alone(self, call: Callable[[], Any], chunk: int, hidden: Sequence[mx.array]) -> mx.array:
        """The sum of the terms of stage_loss, without calling a layer."""
        with collecting() as terms:
            calls_of(self._stage).shape_of_call(call, chunk)
        return sum(terms.sums, mx.zeros(()))

    def _reached(self, function: Callable[[list[mx.array]], mx.array], hidden: list[mx.array]) -> list[str]:
        def returned(probe: mx.array) -> AbstractContextManager[None]:
            return outputs_through(self._model, lambda x: mx.stop_gradient(x) + probe.astype(x.dtype))

        return _reached(self._model, function, hidden, returned)


def _reached(
    model: nn.Module,
    function: Callable[[list[mx.array]], mx.array],
    hidden: list[mx.array],
    returned: Callable[[mx.array], AbstractContextManager[Any]],
) -> list[str]:
    """Lists what the result of a function depends on, in the order of the parameters. Within ``returned``, modules
    return what is made of the given array. Random numbers go on as if the function had not been called."""
    tree = model.trainable_parameters()
    random_state: Any = mx.random.state
    high, low = random_state[0].tolist()
    flat: Any = tree_flatten(tree)
    names = [path for path, _ in flat]
    found: set[str] = set()

    def watched(name: str, array: mx.array) -> mx.array:
        def note(cotangents: Sequence[mx.array]) -> Sequence[mx.array]:
            # MLX gives zeros to an argument of mx.checkpoint that the result does not depend on.
            if not all(map(bridge.is_zeros, cotangents)):
                found.add(name)
            return cotangents

        return with_gradients(note, [array])[0]

    def run(probe: mx.array, *arrays: mx.array) -> list[mx.array]:
        probe = watched(_RETURNED, probe)
        model.update(tree_unflatten([(path, watched(path, x)) for path, x in zip(names, arrays)]))
        received = [watched(_RECEIVED, x) for x in arrays[len(names) :]]
        with returned(probe):
            return [function(received).astype(mx.float32).sum()]

    try:
        mx.vjp(run, [mx.zeros(()), *(array for _, array in flat), *hidden], [mx.ones(())])
    finally:
        model.update(tree)
        mx.random.seed(high << 32 | low)
    return [name for name in (*names, _RECEIVED, _RETURNED) if name in found]
