"""The language model's head of a `SplitModel`: sharded by vocabulary, with the logits of all ranks joined."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.runtime.group.group import Group

from ..layout.partition import join, split_sizes
from .merged import LinearShard, merge, project

__all__ = ["Head", "InPlaceOf", "TiedEmbedding", "shard_head"]


class InPlaceOf(nn.Module):
    """A module that looks up attributes that it does not have in the submodule that ``original`` names."""

    original: str

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.original:  # before it is set
                raise
            return getattr(getattr(self, self.original), name)


class Head(nn.Module):
    """A linear whose outputs are sharded over the ranks, as evenly as they can be; the result is full on each."""

    def __init__(self, linear: nn.Module, group: Group, transposed: bool) -> None:
        super().__init__()
        self._group = group
        # Equal shares, not None: that would reject a vocabulary that the ranks do not divide.
        self._sizes = split_sizes("SplitModel: vocabulary", linear.weight.shape[0], group.size(), [1] * group.size())
        self.matrix = merge([linear], [LinearShard(0, tuple(self._sizes), group.rank())], transposed)
        self._specs = tuple(matrix.spec for matrix in self.matrix)

    def __call__(self, x: mx.array) -> mx.array:
        return join(project(self._specs, self.matrix, x), -1, self._sizes, self._group)


class TiedEmbedding(InPlaceOf):
    """An embedding that is full on each rank, and the same matrix as a `Head`."""

    original = "embedding"

    def __init__(self, embedding: nn.Module, group: Group, transposed: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = Head(embedding, group, transposed)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.head(x)


def shard_head(model: nn.Module, group: Group, transposed: bool | None) -> None:
    """Replaces ``lm_head``, or without one the tied ``embed_tokens``, if it is a plain one with enough tokens."""
    transposed = mx.default_device() == mx.cpu if transposed is None else transposed
    if group.size() == 1 and not transposed:
        return  # it would be a copy
    for name, kinds, shard in (
        ("lm_head", (nn.Linear, nn.QuantizedLinear), Head),
        ("embed_tokens", (nn.Embedding, nn.QuantizedEmbedding), TiedEmbedding),
    ):
        owners = [module for module in model.modules() if name in module]
        if not owners:
            continue
        module = owners[0][name]
        if len(owners) == 1 and type(module) in kinds and module.weight.shape[0] >= group.size():
            owners[0][name] = shard(module, group, transposed)
        return
