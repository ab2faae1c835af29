"""Takes rejected drafts out of the caches of a batch.

Keys and values can be cut at any token. So can sliding windows, right after a call with several tokens: it leaves in
them what they had before. A call with one token writes over the oldest one, and the states of recurrent layers are
those after all tokens of a call. Where there are such, a checkpoint is taken before a step, and the tokens that stay
are computed again from there, where a row has rejected any.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, dynamic_roll

from .row_caches import flat

__all__ = ["Rollback", "arrays_of"]


class Rollback:
    """The caches of a batch at the start of a step.

    Args:
        caches: entries of mlx-lm's prompt caches, of one model.
        by_single_tokens: whether the step calls the model with one token at a time.
    """

    def __init__(self, caches: Sequence[Any], by_single_tokens: bool) -> None:
        self._caches, self._layers = caches, list(flat(caches))
        kinds = [ArraysCache, BatchRotatingKVCache] if by_single_tokens else [ArraysCache]
        self._saved: list[Any] = []
        if any(type(layer) in kinds for layer in self._layers):
            # The arrays are copies of references: mlx-lm assigns to elements of its own.
            self._saved = [
                None if type(layer) is BatchKVCache else tree_map(copy.copy, layer.state) for layer in self._layers
            ]

    def keep(
        self, kept: Sequence[int], before: Sequence[int], inputs: mx.array, compute: Callable[[mx.array], Any]
    ) -> None:
        """Removes from each row all but the first ``kept`` of the tokens that the step has computed.

        Args:
            before: the number of tokens that the cache of each row had.
            inputs: what was computed, of shape (rows, tokens).
            compute: calls the model with tokens of that shape.
        """
        computed = inputs.shape[1]
        if min(kept) == computed:
            return
        if self._saved:
            self._compute_again(kept, inputs, compute)
        else:
            _cut_keys([layer for layer in self._layers if type(layer) is BatchKVCache], kept, before, computed)
            for layer in self._layers:
                if type(layer) is BatchRotatingKVCache:
                    _cut_window(layer, kept, computed)

    def _compute_again(self, kept: Sequence[int], inputs: mx.array, compute: Callable[[mx.array], Any]) -> None:
        for layer, saved in zip(self._layers, self._saved):
            if saved is None:
                layer.trim(inputs.shape[1])
            else:
                layer.state = saved
        most = max(kept)
        padding = [most - each for each in kept]
        if max(padding):  # as mlx-lm computes prompts of unequal lengths
            for each in self._caches:
                each.prepare(lengths=list(kept), right_padding=padding)
        compute(mx.where(mx.arange(most) < mx.array(list(kept))[:, None], inputs[:, :most], 0))
        if max(padding):
            for each in self._caches:
                each.finalize()
        # Here: ranks with unequal shards would order the collectives of this call and of the next ones differently.
        mx.eval([arrays_of(layer) for layer in self._layers])


def arrays_of(cache: Any) -> list[mx.array]:
    """The arrays of a cache's state."""
    leaves: Any = tree_flatten(cache.state)
    return [value for _, value in leaves if isinstance(value, mx.array)]


def _cut_keys(layers: Sequence[Any], kept: Sequence[int], before: Sequence[int], computed: int) -> None:
    """The rows of mlx-lm's batches end together, padded on the left. Rows that keep fewer tokens move to the right."""
    if not layers:
        return
    first = layers[0]
    after = [sum(each) for each in zip(before, kept)]
    end, ended = max(after), first._idx - computed
    shifts = [(end - now) - (ended - then) for now, then in zip(after, before)]
    places = mx.array(shifts)
    # One array for all layers: attention evaluates it. Each layer's own padding would be a graph that grows.
    offset, left_padding = first.offset + mx.array(list(kept)) - computed, first.left_padding + places
    for layer in layers:
        if any(shifts):
            layer.keys = dynamic_roll(layer.keys, places[:, None], axis=2)
            layer.values = dynamic_roll(layer.values, places[:, None], axis=2)
        layer.offset, layer.left_padding, layer._idx = offset, left_padding, end


def _cut_window(layer: Any, kept: Sequence[int], computed: int) -> None:
    """The same for a window, whose arrays are in the order of time and end with the tokens of the step."""
    most = max(kept)
    places = mx.array([most - each for each in kept])
    end = layer._idx - (computed - most)
    if min(kept) < most:
        layer.keys = dynamic_roll(layer.keys, places[:, None], axis=2)
        layer.values = dynamic_roll(layer.values, places[:, None], axis=2)
    layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
    # Where a window has left tokens behind, mlx-lm's padding is negative; what has moved in here hides as padding does.
    layer.left_padding = mx.maximum(layer.left_padding, 0) + places
    layer.offset = layer.offset + mx.array(list(kept)) - computed
    layer._idx, layer._offset = end, layer._offset - (computed - most)
