"""The plain fully sharded data parallelism in one process, where the ranks are a list: slow, and obviously right.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054,
section 5: a rank holds a shard of the optimizer state (5.1), of the gradients (5.2) and of the parameters (5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten


def flat(tree: Any) -> mx.array:
    """All arrays of a tree as one vector, in the order of their paths."""
    return mx.concatenate([array.flatten() for _, array in tree_flatten(tree)])


def shards(vector: mx.array, ranks: int) -> list[mx.array]:
    """Equal parts of a vector, one for each rank, with zeros at the end of the last ones."""
    length = -(-vector.size // ranks)
    return mx.split(mx.pad(vector, (0, ranks * length - vector.size)), ranks)


def like(tree: Any, vector: mx.array) -> Any:
    """The reverse of :func:`flat`: arrays with the paths and shapes of those in ``tree``."""
    arrays, start = [], 0
    for path, array in tree_flatten(tree):
        arrays.append((path, vector[start : start + array.size].reshape(array.shape)))
        start += array.size
    return tree_unflatten(arrays)


class Zero:
    """What ``ranks`` ranks hold of the trained parameters of ``model``, and the optimizer of each.

    ``model`` itself is what a rank has for as long as it computes: the parameters that it gathers.
    """

    def __init__(self, model: nn.Module, ranks: int, optimizer: Callable[[], optim.Optimizer]) -> None:
        self._model = model
        self._parameters = shards(flat(model.trainable_parameters()), ranks)
        self._optimizers = [optimizer() for _ in range(ranks)]

    def gradients(
        self, loss: Callable[..., mx.array], batches: Sequence[Sequence[mx.array]]
    ) -> tuple[mx.array, list[mx.array]]:
        """The mean of ``loss(model, *batch)`` over the batches, one of each rank, and the shards of its gradients."""
        ranks = len(self._parameters)
        losses, sums = mx.array(0.0), [mx.zeros_like(shard) for shard in self._parameters]
        for batch in batches:
            self.gather()
            value, gradients = nn.value_and_grad(self._model, loss)(self._model, *batch)
            losses = losses + value
            sums = [a + b for a, b in zip(sums, shards(flat(gradients), ranks))]  # a reduce-scatter
        return losses / ranks, [shard / ranks for shard in sums]

    def update(self, gradients: Sequence[mx.array]) -> None:
        """Each rank's optimizer makes the step of its own shard."""
        for rank, (optimizer, gradient) in enumerate(zip(self._optimizers, gradients)):
            parameters = {"shard": self._parameters[rank]}
            self._parameters[rank] = optimizer.apply_gradients({"shard": gradient}, parameters)["shard"]
        self.gather()
        mx.eval(self._parameters, [optimizer.state for optimizer in self._optimizers])

    def gather(self) -> None:
        """An all-gather: the model has the parameters of all shards."""
        self._model.update(like(self._model.trainable_parameters(), mx.concatenate(self._parameters)))
