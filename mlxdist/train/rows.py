"""Rows of tokens: the samples of a dataset as arrays that a model takes, padded one by one or packed together."""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument

__all__ = ["Dataset", "PackedRows", "PaddedRows", "Rows"]

_PAD_TO = 32  # mlx-lm's: batches of few widths, so that few are compiled


class Dataset(Protocol):
    """Samples by number: token ids, or (token ids, offset) with the number of tokens that are no target."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Rows(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> tuple[mx.array, mx.array]:
        """The rows and their lengths, as the losses of mlx-lm take them: int32 of shape (rows, width), and of shape
        (rows, 2), where a row's first target and its end are."""


class PaddedRows:
    """A sample a row, as mlx-lm's ``iterate_batches`` pads and truncates it."""

    def __init__(self, dataset: Dataset, max_seq_length: int) -> None:
        self._dataset, self._max, self._has_warned = dataset, max_seq_length, False
        if len(dataset):
            _sample(dataset, 0)  # a dataset of another kind is an error here, not in the first step

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, numbers: Sequence[int]) -> tuple[mx.array, mx.array]:
        samples = [_sample(self._dataset, number) for number in numbers]
        longest = max(len(tokens) for tokens, _ in samples)
        if longest > self._max and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Batches: a sample of {longest} tokens is truncated to max_seq_length={self._max}; split long "
                "samples, or pack them (packed=True); others may be, too",
                stacklevel=3,
            )
        for number, (_, offset) in zip(numbers, samples):
            if offset >= self._max:
                warnings.warn(
                    f"Batches: sample {number} has no target: its first is token {offset}, and max_seq_length is "
                    f"{self._max}; the loss of a batch of such samples alone is NaN, leave them out",
                    stacklevel=3,
                )
        width = min(1 + -(-longest // _PAD_TO) * _PAD_TO, self._max)
        rows = np.zeros((len(samples), width), np.int32)
        for row, (tokens, _) in zip(rows, samples):
            row[: len(tokens)] = tokens[:width]
        lengths = [(offset, min(len(tokens), width)) for tokens, offset in samples]
        return mx.array(rows), mx.array(lengths)


class PackedRows:
    """All samples one after the other, in rows of equal length: no padding, and nothing is truncated.

    The last token of a row is the first of the next: each token but the first is a target once. Tokens behind the last
    full row are left out.
    """

    def __init__(self, dataset: Dataset, row_length: int) -> None:
        samples = [_sample(dataset, number) for number in range(len(dataset))]
        masked = next((number for number, (_, offset) in enumerate(samples) if offset), None)
        if masked is not None:
            raise InvalidArgument(
                f"Batches: sample {masked} has {samples[masked][1]} tokens that are no target, which packed rows do "
                "not keep apart; use packed=False, or leave prompts unmasked"
            )
        self._tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in samples)])
        self._length = row_length

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // (self._length - 1)

    def batch(self, numbers: Sequence[int]) -> tuple[mx.array, mx.array]:
        starts = [number * (self._length - 1) for number in numbers]
        rows = np.stack([self._tokens[start : start + self._length] for start in starts])
        return mx.array(rows), mx.array([(0, self._length)] * len(rows))


def _sample(dataset: Dataset, number: int) -> tuple[np.ndarray, int]:
    """A sample's tokens, int32 of one dimension, and its offset."""
    item = dataset[number]
    tokens, offset = item if isinstance(item, tuple) and len(item) == 2 else (item, 0)
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        ids = np.zeros((1, 1))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or not isinstance(offset, (int, np.integer)):
        raise InvalidArgument(
            f"Batches: sample {number} of the dataset is a {type(item).__name__} and not token ids, nor (token ids, "
            "offset); a dataset of mlx-lm belongs in its CacheDataset, files in train.load_dataset"
        )
    return ids.astype(np.int32), int(offset)
