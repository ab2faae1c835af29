"""The balance loss of a model's routers: experts that are chosen about equally often.

The loss is computed for each sequence by itself, as in DeepSeek-V3 (arXiv:2412.19437, eq. 17 to 20), so that it does
not depend on how rows are divided over ranks and micro-batches. Its scale is that of transformers'
``load_balancing_loss_func``: with E experts, k of them for each token, it is E * sum over experts of (times chosen /
tokens) * (mean probability), which is k if all are chosen equally often.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.interception import intercept

from .stage_terms import stage_loss

__all__ = ["RouterBalance"]


class RouterBalance:
    """Records the choices of a model's routers, and computes their balance loss.

    Args:
        model: with blocks of mlx-lm that have a router ``gate`` and experts ``switch_mlp``, also in stages. Its
            layers must not be checkpointed (``mx.checkpoint``), whose inside has no gradients outside, nor sharded by
            shard_model, which adds up the gradients inside a block over the ranks.

    Raises:
        InvalidArgument: there is no such block.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counts: mx.array | None = None
        self._losses: list[mx.array] = []
        blocks = [module for module in model.modules() if "switch_mlp" in module and "gate" in module]
        if not blocks:
            raise InvalidArgument(
                "router_aux_loss_coef: the model has no blocks with a router 'gate' and experts 'switch_mlp'"
            )
        self._blocks = len(blocks)  # also those of other stages
        for block in blocks:
            intercept(block["switch_mlp"], __call__=self._noting(block))

    @contextmanager
    def watching(self, counts: mx.array) -> Iterator[None]:
        """Within, the model is called with tokens (rows, length); tokens count where ``counts`` is True."""
        self._counts, self._losses = counts, []
        try:
            yield
        finally:
            self._counts = None

    def loss(self, weights: mx.array) -> mx.array:
        """The mean over the blocks and, by ``weights`` (rows), the sequences of the call that was watched."""
        total = mx.zeros(()) if not self._losses else sum(self._losses) / self._blocks
        mean = (total * weights).sum() / mx.maximum(weights.sum(), 1)
        self._losses = []
        return stage_loss(self._model, mean)

    def _noting(self, block: nn.Module) -> Any:
        def call(kind: Any, switch: nn.Module, x: mx.array, indices: mx.array, *args: Any, **keywords: Any) -> mx.array:
            if self._counts is not None:
                self._losses.append(self._of_sequences(block["gate"](x), indices, self._counts))
            result: mx.array = kind.__call__(switch, x, indices, *args, **keywords)
            return result

        return call

    @staticmethod
    def _of_sequences(logits: Any, indices: mx.array, counts: mx.array) -> mx.array:
        if not isinstance(logits, mx.array):
            raise InvalidArgument("router_aux_loss_coef: the model's routers do not return a score for each expert")
        experts = logits.shape[-1]
        logits, indices = (x.reshape(*counts.shape, -1) for x in (logits, indices))
        tokens, masks = mx.maximum(counts.sum(1, keepdims=True), 1), counts[..., None]
        chosen = (indices[..., None] == mx.arange(experts)).sum(2) * masks
        probabilities = mx.softmax(logits.astype(mx.float32), axis=-1) * masks
        return experts * ((chosen.sum(1) / tokens) * (probabilities.sum(1) / tokens)).sum(-1)
