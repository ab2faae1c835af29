"""Terms of a loss that are not made of the model's result, in pipelines: each stage has some of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.pipeline_parallel.stage import stage_of
from mlxdist.runtime.operations.collectives import all_sum

__all__ = ["Terms", "collecting", "stage_loss"]


@dataclass
class Terms:
    """The sums over stages of a micro-batch's terms: one sum for each call of :func:`stage_loss`.

    Attributes:
        before: the sums over the stages before; none on the first.
        sums: the sums with this stage's own terms.
        is_cut: whether the sums that the loss gets are constants.
    """

    before: Sequence[mx.array]
    sums: list[mx.array] = field(default_factory=list)
    is_cut: bool = False


_current: ContextVar[Terms | None] = ContextVar("current", default=None)


@contextmanager
def collecting(before: Sequence[mx.array] = (), *, is_cut: bool = False) -> Iterator[Terms]:
    """Within, each term that :func:`stage_loss` gets is added to its sum in ``before``."""
    terms = Terms(before, is_cut=is_cut)
    token = _current.set(terms)
    try:
        yield terms
    finally:
        _current.reset(token)


def stage_loss(model: nn.Module, term: Any) -> mx.array:
    """The sum over the stages of ``model`` of a term of the loss that each stage has for itself.

    The loss of a model of :func:`pipeline_parallel` is what the last stage computes of the model's result. A term of
    parameters, or of activations inside the model, is of each stage's own; with this it is in the loss, and its
    gradient on each stage::

        squares = sum(p.square().sum() for _, p in tree_flatten(model.stage.trainable_parameters()))
        return cross_entropy(model(inputs), targets).mean() + stage_loss(model, 0.1 * squares)

    The sum passes from stage to stage with the activations, and its gradient back: 4 bytes each. A stage without such a
    term gives 0; all stages make the same calls. Without stages the result is ``term``.

    Args:
        model: whose parameters or activations the term is made of.
        term: of this stage: a number, or an array of one element.

    Returns:
        The sum, of the shape and dtype of ``term``. In a loss of :func:`value_and_grad` only the last stage, whose loss
        counts, has all of it.

    Raises:
        InvalidArgument: ``term`` is no number. In :func:`value_and_grad`, on all ranks: the term is made of what the
            model returns, or several stages count the same parameter.
    """
    own = term if isinstance(term, mx.array) else mx.array(float(term))
    if own.size != 1:
        raise InvalidArgument(f"stage_loss: the term has shape {own.shape}; give a number, such as its sum")
    terms, stage = _current.get(), stage_of(model)
    if stage is None or stage.stages == 1:
        return own
    if terms is None:  # such as in a validation
        return all_sum(own, group=stage.group)
    number, total = len(terms.sums), own.reshape(()).astype(mx.float32)
    if number < len(terms.before):
        total = total + terms.before[number]
    terms.sums.append(total)
    total = total.reshape(own.shape).astype(own.dtype)
    return mx.stop_gradient(total) if terms.is_cut else total
