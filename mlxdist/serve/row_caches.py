"""Entries of mlx-lm's prompt caches that have a value for each row of a batch, and no keys and values.

mlx-lm's batches join, split and keep prompt caches, and thereby the values of their rows. A model that wraps mlx-lm's
reads its entry in each call.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from mlx import nn
from mlx_lm.models.cache import CacheList, _BaseCache

from mlxdist.nn.pipeline_parallel.stage import Stage, stage_of

__all__ = ["ModelWrapper", "PaddedRowCache", "RowCache", "flat", "of_layers", "of_rows"]


class ModelWrapper(nn.Module):
    """A model for mlx-lm's generators around another model, with entries of its own in prompt caches."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def stage(self) -> Stage | None:
        """The stage of the model; see :func:`stage_of`."""
        return stage_of(self.model)


class RowCache(_BaseCache):
    """The values of the rows, ``rows``; with the methods for mlx-lm's batches.

    Attributes:
        none: the value of a request that does not say.
    """

    none: ClassVar[Any] = None

    def __init__(self, rows: Sequence[Any] = ()) -> None:
        self.rows = list(rows) or [self.none]

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        return cls([row for cache in caches for row in cache.rows])

    def extend(self, other: Self) -> None:
        self.rows += other.rows

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in batch_indices]

    def extract(self, idx: int) -> Self:
        return type(self)([self.rows[idx]])

    def prepare(self, **keywords: Any) -> None:
        """Does nothing: this cache has no axis of tokens that prompts would be padded on."""

    def finalize(self) -> None:
        """Does nothing; see :meth:`prepare`."""

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        return n

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return 0


class PaddedRowCache(RowCache):
    """Values of rows that count the tokens of calls: where rows are padded, not those behind their own."""

    def __init__(self, rows: Sequence[Any] = ()) -> None:
        super().__init__(rows)
        self._lengths: list[int] | None = None  # tokens left of each row before its padding; None without padding

    def prepare(self, *, lengths: Any = None, **keywords: Any) -> None:
        self._lengths = list(lengths)

    def finalize(self) -> None:
        self._lengths = None

    def unpadded(self, length: int) -> list[int]:
        """The number of tokens of each row without padding, in the next call, of ``length`` tokens."""
        if self._lengths is None:
            return [length] * len(self.rows)
        found = [min(left, length) for left in self._lengths]
        self._lengths = [left - own for left, own in zip(self._lengths, found)]
        return found


def of_layers(cache: Sequence[Any]) -> list[Any]:
    """The entries with keys and values, which the prefix cache keeps."""
    return [each for each in cache if not isinstance(each, RowCache)]


def of_rows(cache: Sequence[Any]) -> list[RowCache]:
    """The entries with values of rows, which are behind those with keys and values."""
    return [each for each in cache if isinstance(each, RowCache)]


def flat(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of all layers, those in lists, too; without the values of rows, which are no function of tokens."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from flat(cache.caches)
        elif not isinstance(cache, RowCache):
            yield cache
