"""A whole model of mlx-lm whose layers are `SplitBlock`s, for mlx-lm's own generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...arguments import group_of
from ...errors import InvalidArgument
from ...group import Group
from ..shards import join, split_sizes
from .merged import Cut, merge, project
from .split_block import TOLERANCE, SplitBlock, positions, relative_error, require_agreement

__all__ = ["SplitModel"]


class SplitModel(nn.Module):
    """What :meth:`from_model` makes. ``mlx_lm.generate(model, tokenizer, ...)`` takes it like the model itself.

    Every rank must generate the same tokens: from the same seed, or greedily. Logits are equal on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[SplitBlock],
        head: Callable[[mx.array], mx.array],
        group: Group,
    ) -> None:
        super().__init__()
        self.args, self.model_type = model.args, model.model_type
        self.embed_tokens, self.norm = model.model.embed_tokens, model.model.norm
        self.layers, self.head = blocks, head
        self._group = group

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        group: Group | None = None,
        *,
        weights: Sequence[float] | None = None,
        transposed: bool | None = None,
        submit: bool | None = None,
        check: bool = True,
    ) -> SplitModel:
        """Cuts a model of mlx-lm whose layers :meth:`SplitBlock.from_layer` takes, and takes it to pieces.

        ``model.model`` must have ``embed_tokens``, ``layers`` and ``norm``; the head is ``lm_head`` or, where
        ``args.tie_word_embeddings``, the embedding. Embedding and norm are on every rank, the head is cut by vocabulary
        and its logits are gathered. Each layer of ``model`` is given up as soon as it is cut.

        Args:
            weights, transposed, submit: as for a layer.
            check: compare the logits of three tokens with those of ``model``, on every rank. A collective.

        Raises:
            InvalidArgument: a layer or the model has another shape, or cannot be cut like this, or (``check``) computes
                something else, or is not the same on all ranks.
        """
        group = group_of(group)
        refused = split = wanted = None
        tokens = mx.array([[0, 1, 2]])
        try:
            _require_shape(model)
            if check:
                wanted = model(tokens)
                mx.eval(wanted)
            split = cls._cut(model, group, weights, transposed, submit)
        except InvalidArgument as error:
            refused = error
        if not check:
            if refused is not None:
                raise refused
            return split
        require_agreement(refused, group, "SplitModel.from_model")
        error = relative_error(split(tokens), wanted)
        if not error <= TOLERANCE.get(wanted.dtype, 1e-3):
            refused = InvalidArgument(
                f"SplitModel: its logits differ from those of the {model.model_type} by {error:.2g} of their norm: the "
                "model computes something that SplitModel does not, or the ranks hold different weights"
            )
        require_agreement(refused, group, "SplitModel.from_model")
        return split

    @classmethod
    def _cut(
        cls,
        model: nn.Module,
        group: Group,
        weights: Sequence[float] | None,
        transposed: bool | None,
        submit: bool | None,
    ) -> SplitModel:
        layers, blocks = model.model.layers, []
        for number, layer in enumerate(layers):
            ropes = {id(block.rope): block.rope for block in blocks}.values()
            blocks.append(
                SplitBlock.from_layer(
                    layer, group, weights=weights, transposed=transposed, submit=submit, ropes=ropes, check=False
                )
            )
            layers[number] = None
        return cls(model, blocks, Head(model, group, transposed), group)

    def __call__(
        self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Tokens (batch, length) to logits (batch, length, vocabulary), on every rank."""
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        r = None
        caches = cache or [None] * len(self.layers)
        places: dict[tuple, Any] = {}
        for block, own in zip(self.layers, caches):
            offset = None if own is None else own.offset
            key = id(block.rope), offset
            if key not in places:
                places[key] = positions(block.rope, h.shape[1], offset, "causal")
            h, r = block.step(h, r, places[key], own)
        return self.head(self.norm(h + r))


class Head(nn.Module):
    """The language model's head, cut by vocabulary where that is at least a token per rank; logits are gathered."""

    def __init__(self, model: nn.Module, group: Group, transposed: bool | None) -> None:
        super().__init__()
        tied = not hasattr(model, "lm_head")
        linear = _as_linear(model.model.embed_tokens) if tied else model.lm_head
        vocabulary = linear.weight.shape[0]
        self._group = group
        # The ranks need not be able to share it equally: nearly so, by largest remainder.
        self._sizes = split_sizes("SplitModel: vocabulary", vocabulary, group.size(), [1] * group.size())
        transposed = mx.default_device() == mx.cpu if transposed is None else transposed
        self.matrix = merge([linear], [Cut(0, tuple(self._sizes), group.rank())], transposed)
        self._specs = tuple(matrix.spec for matrix in self.matrix)

    def __call__(self, x: mx.array) -> mx.array:
        logits = project(self._specs, self.matrix, x)
        return join(logits, -1, self._sizes, self._group)


def _require_shape(model: nn.Module) -> None:
    inner = getattr(model, "model", None)
    missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(inner, name)]
    if missing or not hasattr(model, "args"):
        raise InvalidArgument(
            f"SplitModel: {type(model).__module__} has no model.{', model.'.join(missing) or 'args'}: it is not shaped "
            "like mlx-lm's Llama"
        )
    if not hasattr(model, "lm_head") and not getattr(model.args, "tie_word_embeddings", False):
        raise InvalidArgument("SplitModel: the model has neither lm_head nor args.tie_word_embeddings")
    if any(layer is None for layer in inner.layers):
        raise InvalidArgument("SplitModel: the model was cut already, which has taken its layers; load it again")


def _as_linear(embedding: nn.Module) -> nn.Module:
    """A linear with the weight of a tied embedding, dense or quantized."""
    if type(embedding) is nn.Embedding:
        linear = nn.Linear(1, 1, bias=False)
    elif type(embedding) is nn.QuantizedEmbedding:
        linear = nn.QuantizedLinear.__new__(nn.QuantizedLinear)
        nn.Module.__init__(linear)
        linear.group_size, linear.bits, linear.mode = embedding.group_size, embedding.bits, embedding.mode
    else:
        name = type(embedding).__name__
        raise InvalidArgument(f"SplitModel: {name} is neither nn.Embedding nor nn.QuantizedEmbedding")
    for name in ("weight", "scales", "biases"):
        if embedding.get(name) is not None:
            linear[name] = embedding[name]
    return linear
