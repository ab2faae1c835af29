"""The gradients of the micro-batches of a model whose layers are all on this rank: one after the other."""

from itertools import count
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxdist.nn.mappings import with_gradients

from .gradient_accumulation import MicroBatch
from .gradient_buckets import sum_dtype
from .lost_terms import check_shards
from .step_loss import StepLoss

__all__ = ["FullModelGradients"]


class FullModelGradients:
    """Implements ``GradientSums`` of step_gradients.py."""

    stage_losses = 0  # there are no stages

    def __init__(self, loss: StepLoss) -> None:
        self._loss = loss
        self._noted: list[int] | None = None

    def prepare(self, tree: Any, micro_batches: list[MicroBatch], is_new: bool) -> list[int]:
        loss, self._tree, self._micro_batches = self._loss, tree, micro_batches
        self._noted = [] if is_new else None
        self._first = self._differentiate(0)
        if is_new and loss.is_weighted and loss.averaging.has_shards:
            args, kwargs = micro_batches[0]
            check_shards(loss.averaging.model, lambda: loss.weighted(loss.fn(*args, **kwargs)))
        noted, self._noted = self._noted or [], None
        never = set(range(len(self._first))).difference(noted)  # of what the loss does not depend on: at once
        return [*sorted(never), *noted]

    def sums(self) -> dict[int, mx.array]:
        sums = self._first
        for number in range(1, len(self._micro_batches)):
            sums = {place: array.astype(sum_dtype(array.dtype)) for place, array in sums.items()}
            # Each micro-batch is evaluated by itself: in one graph, the activations of all of them could be alive at
            # once, and a batch that is larger than the memory is what micro-batches are for.
            mx.async_eval(sums, _arrays(self._loss.values[-1]), self._loss.kept_gradients)
            for place, array in self._differentiate(number).items():
                sums[place] = sums[place] + array.astype(sums[place].dtype)
        return sums

    def unfinished(self) -> list[mx.array]:
        return _arrays(self._loss.values)

    def result(self) -> Any:
        return self._loss.result()

    def _differentiate(self, number: int) -> dict[int, mx.array]:
        """The gradients of a micro-batch, by number; times its tokens if ``fn`` counts tokens."""
        loss, model = self._loss, self._loss.averaging.model

        def differentiated(parameters: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[mx.array, Any]:
            model.update(parameters if self._noted is None else self._watched(parameters))
            value = loss.call(args, kwargs)
            return loss.weighted(value), value

        try:
            with loss.micro_batch(number):
                (_, value), gradients = mx.value_and_grad(differentiated)(self._tree, *self._micro_batches[number])
        finally:
            model.update(self._tree)
        loss.values.append(value)
        loss.is_weighted = isinstance(value, tuple)
        flat: Any = tree_flatten(gradients)
        return loss.counted(value, dict(enumerate(flat)))

    def _watched(self, parameters: Any) -> Any:
        """The parameters. Backward: their places are noted in the order in which their gradients are ready."""

        def watch(place: int, array: mx.array) -> mx.array:
            def note(cotangents: Any) -> Any:
                if self._noted is not None and place not in self._noted:
                    self._noted.append(place)
                return cotangents

            return with_gradients(note, [array])[0]

        places = count()
        return tree_map(lambda array: watch(next(places), array), parameters)


def _arrays(tree: Any) -> list[mx.array]:
    flat: Any = tree_flatten(tree)
    return [leaf for _, leaf in flat if isinstance(leaf, mx.array)]
