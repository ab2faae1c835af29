"""Embedding and output layer whose vocabulary is sharded over the ranks.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, without padding: the sizes of two ranks differ by at most one
token, unless ``rank_shares`` say otherwise. :mod:`mlxdist.nn.tensor_parallel.sampling` works with sharded logits.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..equal_inputs import require_equal
from ..layout.partition import own_tokens, require_counts, shard_slice, split_sizes
from ..mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from ..rank_checks import agreed, described
from .column_parallel import ColumnParallelLinear, QuantizedColumnParallelLinear
from .linear_layers import dims, product, quantization
from .parallel_linear import Sharded, pair, with_weight_of

__all__ = ["ParallelLMHead", "QuantizedParallelLMHead", "QuantizedVocabParallelEmbedding", "VocabParallelEmbedding"]


class _VocabParallel(Sharded):
    """The embedding with a plain or a quantized weight."""

    def _shard(self, full: nn.Module, gather_output: bool, rank_shares: Sequence[float] | None, group: Group) -> None:
        super().__init__()
        name = f"{type(self).__name__}: num_embeddings"
        self.num_embeddings, self.dims = dims(full)
        self.gather_output = gather_output
        # As even as can be is in proportion to equal shares.
        rank_shares = [1] * group.size() if rank_shares is None else rank_shares
        self._take_from(full, split_sizes(name, self.num_embeddings, group.size(), rank_shares), group)

    def __call__(self, tokens: mx.array) -> mx.array:
        if not mx.issubdtype(tokens.dtype, mx.integer):
            raise InvalidArgument(f"{type(self).__name__}: tokens must be integers, not {tokens.dtype}")
        here = shard_slice(self._sizes, self._group.rank())
        mine, local = own_tokens(require_equal(tokens, self._group), here)
        return reduce_from_tensor_parallel_region(mx.where(mine[..., None], self._rows(local), 0), group=self._group)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of ``x`` of shape (..., dims), with the embedding as the weight of the output layer.

        The result has this rank's shard of the vocabulary, shape (..., sizes[rank]); with ``gather_output`` all of it,
        by one all_gather. ``x`` is the same on all ranks, as is its gradient. Raises InvalidArgument for other shapes.
        """
        if x.ndim == 0 or x.shape[-1] != self.dims:
            raise InvalidArgument(
                f"{type(self).__name__}: x has shape {x.shape}, whose last dimension must be {self.dims}"
            )
        logits = product(self, copy_to_tensor_parallel_region(x, group=self._group))
        return self.join_shards(logits, -1) if self.gather_output else logits

    def to_embedding(self) -> nn.Embedding | nn.QuantizedEmbedding:
        """The full embedding, on every rank: bitwise the one that ``from_embedding`` was given.

        A collective that is carried out at once: all ranks call it, in the same order.
        """
        config = quantization(self)
        # Its dimensions come from the parameters; those here only have to be allowed.
        full = nn.QuantizedEmbedding(1, self.dims, **config) if config else nn.Embedding(1, self.dims)
        if config:
            full.num_embeddings = self.num_embeddings
        return self._join_into(full)

    def _rows(self, tokens: mx.array) -> mx.array:
        """The embeddings of tokens, numbered from this rank's first."""
        config = quantization(self)
        if not config:
            return self["weight"][tokens]
        if tokens.size == 0:  # MLX dequantizes no array without elements, and no vector
            return self._rows(mx.zeros((1,), tokens.dtype))[:0].reshape(*tokens.shape, self.dims)
        flat, biases = tokens.reshape(-1), self.get("biases")
        biases = None if biases is None else biases[flat]
        rows = mx.dequantize(self["weight"][flat], self["scales"][flat], biases, **config)
        return rows.reshape(*tokens.shape, self.dims)


class VocabParallelEmbedding(_VocabParallel):
    """``nn.Embedding`` whose rows, one for each token of the vocabulary, are sharded over the ranks.

    Called with tokens, integers of any shape (...) that are the same on all ranks, it returns their embeddings, shape
    (..., dims), the same on all ranks and bitwise those of ``nn.Embedding``: one all_sum of them, to which each rank
    gives zeros for the tokens of others, once all are known to have the same tokens (else it is a Mismatch). A token
    from outside the vocabulary has an embedding of zeros. The gradient of ``weight`` is this rank's rows of that of
    ``nn.Embedding``; the initial values too: seed all ranks alike.

    Args:
        num_embeddings, dims: the size of the vocabulary, at least one token for each rank, and of an embedding.
        gather_output: whether :meth:`as_linear` returns all logits, on every rank, instead of this rank's.
        rank_shares: one positive number a rank, to shard the vocabulary in proportion to; ``None`` for equal shards.
        group: the ranks, which make the layer together; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: on all ranks, if the vocabulary cannot be sharded so.
        Mismatch: on all ranks, if their arguments differ.
    """

    def __init__(
        self,
        num_embeddings: int,
        dims: int,
        *,
        gather_output: bool = False,
        rank_shares: Sequence[float] | None = None,
        group: GroupLike | None = None,
    ) -> None:
        group = group_of(group)
        with agreed("VocabParallelEmbedding", group, num_embeddings, dims, gather_output, rank_shares):
            require_counts("VocabParallelEmbedding", num_embeddings=num_embeddings, dims=dims)
            self._shard(nn.Embedding(num_embeddings, dims), gather_output, rank_shares, group)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding | nn.QuantizedEmbedding,
        *,
        gather_output: bool = False,
        rank_shares: Sequence[float] | None = None,
        group: GroupLike | None = None,
    ) -> "VocabParallelEmbedding | QuantizedVocabParallelEmbedding":
        """This rank's rows of an embedding that all ranks hold: the quantized form of a quantized one.

        Arguments as for the class. Parameters that are frozen stay so. :meth:`to_embedding` is the way back.

        Raises:
            InvalidArgument: on all ranks, as for the class, and if ``embedding`` is something else on one of them.
        """
        group = group_of(group)
        is_quantized = isinstance(embedding, nn.QuantizedEmbedding)
        kind: type[VocabParallelEmbedding | QuantizedVocabParallelEmbedding]
        kind = QuantizedVocabParallelEmbedding if is_quantized else cls
        layer = kind.__new__(kind)
        with agreed(f"{cls.__name__}.from_embedding", group, gather_output, rank_shares, described(embedding)):
            kinds = (nn.Embedding, nn.QuantizedEmbedding)
            if not any(isinstance(embedding, k) and type(embedding).__call__ is k.__call__ for k in kinds):
                raise InvalidArgument(
                    f"{cls.__name__}.from_embedding: the layer must be an nn.Embedding or nn.QuantizedEmbedding, not "
                    f"{type(embedding).__name__}"
                )
            layer._shard(embedding, gather_output, rank_shares, group)
        return layer

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", quantize_input: bool = False
    ) -> "QuantizedVocabParallelEmbedding":
        """The quantized form, with what the full embedding's would have: for ``nn.quantize``. No collective.

        ``group_size``, ``bits``, ``mode``, ``quantize_input``: as in ``nn.Embedding.to_quantized``.
        """
        local = nn.Embedding(1, self.dims)
        local.weight = self["weight"]
        return with_weight_of(
            self, QuantizedVocabParallelEmbedding, local.to_quantized(group_size, bits, mode, quantize_input)
        )


class QuantizedVocabParallelEmbedding(_VocabParallel):
    """``nn.QuantizedEmbedding`` whose rows are sharded over the ranks; otherwise as VocabParallelEmbedding.

    Made by ``VocabParallelEmbedding.from_embedding`` or by ``nn.quantize``. Parameters:
    ``weight``, ``scales`` and, in the mode "affine", ``biases``, frozen; attributes besides: ``group_size``, ``bits``,
    ``mode``.
    """


class ParallelLMHead(ColumnParallelLinear):
    """The output layer of a language model. Each rank computes the logits of its shard of the vocabulary.

    A :class:`mlxdist.nn.ColumnParallelLinear` whose outputs need not be a multiple of the ranks. Called with shape
    (..., input_dims), the same on all ranks, it returns this rank's logits, shape (..., sizes[rank]): with its
    ``sizes``, what the functions of :mod:`mlxdist.nn.tensor_parallel.sampling` take. With ``gather_output`` it returns
    all of them, by one all_gather of padded shards: for code without sharded logits, such as mlx-lm's ``generate``.

    Args:
        input_dims: features of the input.
        output_dims: the size of the vocabulary, at least one token for each rank.
        bias: as in ``nn.Linear``; it is sharded like the vocabulary.
        gather_output, sequence_parallel, rank_shares, group: as for ``ColumnParallelLinear``.

    Raises:
        InvalidArgument: the vocabulary cannot be sharded so: the same on all ranks, before any collective.
    """

    uneven = True


class QuantizedParallelLMHead(QuantizedColumnParallelLinear):
    """:class:`ParallelLMHead` with a quantized weight; its parameters are frozen. Each token has its own groups.

    Args:
        group_size, bits, mode: as in ``nn.QuantizedLinear``; the others as for :class:`ParallelLMHead`.
    """

    uneven = True


pair(ParallelLMHead, QuantizedParallelLMHead)
