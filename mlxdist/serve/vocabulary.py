"""Sampling from logits that are sharded over the vocabulary, inside mlx-lm's batches.

mlx-lm's generators subtract the log-sum-exp of a row of logits and give the row to a sampler. A row here is this rank's
logits and, as one more, the log-sum-exp of all others': so the log-sum-exp of the row is that of the full vocabulary.
Tokens are those of mlx-lm's samplers, from the same random numbers.

A rank sends 4 bytes per row of logits for that sum, and the messages of :class:`mlxdist.nn.VocabParallelSampler`. All
logits of a row are gathered for requests with logits processors or xtc_probability, and for log-probabilities
that a client requests.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.server import SamplingArguments

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn import ParallelLMHead, VocabParallelSampler
from mlxdist.nn.layout.partition import join, shard_slice, split_sizes
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather
from mlxdist.runtime.operations.ordering import Order

__all__ = ["VocabParallelModel"]

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class VocabParallelModel:
    """A model of mlx-lm whose output layer is sharded over the vocabulary, in place. Collective.

    Raises:
        InvalidArgument: it has no output layer of a known type, or more than one.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self._group = model, group
        self._sizes = _shard_output_layer(model, group)
        self._sampler = VocabParallelSampler(sizes=self._sizes, group=group)
        self.greedy: Sampler = self._ordered(lambda row: self._sampler(row[..., :-1]))
        self._order = Order()
        self.vocabulary = sum(self._sizes)

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """This rank's logits, and the log-sum-exp of all others, float32. Shape (requests, tokens, shard size + 1).

        Raises:
            InvalidArgument: the model returns something else than its output layer's logits.
        """
        logits = self.model(tokens, cache=cache).astype(mx.float32)
        if logits.shape[-1] != self._sizes[self._group.rank()]:
            raise InvalidArgument(f"serve: {type(self.model).__module__} does not return its output layer's logits")
        sums = all_gather(mx.logsumexp(logits, axis=-1, keepdims=True)[None], group=self._group)
        return self._with_rest(logits, sums)

    def rows(self, logits: mx.array) -> mx.array:
        """This model's rows of all logits, which this rank has, of shape (..., vocabulary). No collective."""
        shards = mx.split(logits, [shard_slice(self._sizes, rank).stop for rank in range(len(self._sizes) - 1)], -1)
        sums = mx.stack([mx.logsumexp(shard, axis=-1, keepdims=True) for shard in shards])
        return self._with_rest(shards[self._group.rank()], sums)

    def gathered(self, row: mx.array) -> mx.array:
        """All logits, or all log-probabilities, of a row. Collective when the result is evaluated."""
        return self._ordered(lambda row: join(row[..., :-1], -1, self._sizes, self._group))(row)

    def sampler(self, sampling: SamplingArguments, sampler: Sampler) -> Sampler:
        """A sampler for this model's rows with the tokens of ``sampler``, mlx-lm's for ``sampling``, on full rows."""
        if sampler is greedy_sampler:
            return self.greedy  # one for all rows, with which mlx-lm samples them at once
        if sampling.xtc_probability > 0:
            return lambda row: sampler(self.gathered(row))
        sharded = copy(self._sampler)
        sharded.temp, sharded.top_p, sharded.min_p = sampling.temperature, sampling.top_p, sampling.min_p
        sharded.top_k = sampling.top_k

        def sample(row: mx.array) -> mx.array:
            return sharded(row[..., :-1], uniform=mx.random.uniform(shape=(len(row),)))

        return self._ordered(sample)

    def processors(self, processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
        """A logits processor for this model's rows, with the effect of ``processors`` on full rows."""

        def process(tokens: mx.array, row: mx.array) -> mx.array:
            logits = self.gathered(row)
            for processor in processors:
                logits = processor(tokens, logits)
            return self.rows(logits)

        return [process] if processors else []

    def _ordered(self, collective: Sampler) -> Sampler:
        """Orders the rows' collectives: rows are independent, and graphs differ between unequal shards."""
        return lambda row: self._order.carry_out(collective, row)

    def _with_rest(self, logits: mx.array, sums: mx.array) -> mx.array:
        """Appends the other ranks' log-sum-exp. ``sums``: that of each rank's logits, shape (ranks, ..., 1)."""
        rank = self._group.rank()
        others = mx.concatenate([sums[:rank], sums[rank + 1 :]])
        return mx.concatenate([logits, mx.logsumexp(others, axis=0)], axis=-1)


def _shard_output_layer(model: nn.Module, group: Group) -> list[int]:
    """Shards ``lm_head``, or the embedding where it is the output layer. Returns the number of tokens of each rank."""
    modules = dict(model.named_modules())
    heads = [path for path in modules if path.rpartition(".")[2] == "lm_head"]
    embeddings = [path for path, module in modules.items() if type(module) in (nn.Embedding, nn.QuantizedEmbedding)]
    found = heads or embeddings
    if len(found) != 1 or (heads and type(modules[heads[0]]) not in (nn.Linear, nn.QuantizedLinear)):
        raise InvalidArgument(f"serve: the vocabulary of {type(model).__module__} cannot be sharded")
    where, _, name = found[0].rpartition(".")
    layer = modules[found[0]]
    if heads:
        modules[where][name] = ParallelLMHead.from_linear(layer, group=group)
        return modules[where][name].sizes
    sizes = split_sizes("vocabulary", layer["weight"].shape[0], group.size(), [1] * group.size())
    modules[where][name] = _OutputEmbedding(layer, shard_slice(sizes, group.rank()))
    return sizes


class _OutputEmbedding(nn.Module):
    """An embedding with all rows, as on every rank, that computes the logits of the rows ``here``, without a copy."""

    def __init__(self, embedding: nn.Module, here: slice) -> None:
        super().__init__()
        self.embedding, self.shard = embedding, copy(embedding)
        for name, array in embedding.parameters().items():
            self.shard[name] = array[here]

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.shard.as_linear(x)
