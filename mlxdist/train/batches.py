"""Batches: the rows of a dataset in an order that is known for every step, each rank's part of it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.measured_shares import RankShares
from mlxdist.nn.layout.partition import require_counts, shard_slice, split_sizes
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.operations.arguments import group_of

from .rows import Dataset, PackedRows, PaddedRows, Rows
from .schedules import BatchRampUp
from .seeds import MAX_SEED, mix

__all__ = ["Batches"]


class Batches:
    """An iterator over (batch, lengths), which the losses of mlx-lm take; its position can be saved and restored.

        batches = train.Batches(dataset, batch_size=32, seed=seeds.seed, mesh=mesh)
        for batch, lengths in batches:
            loss, tokens = default_loss(model, batch, lengths)
            ...
            checkpoints.save(batches.step, {"model": model, "batches": batches})

    A step takes the next ``batch_size`` rows, whatever the number of ranks, and each rank reads its own part of these.
    Which rows they are depends on the seed, the epoch and the position in it alone. So a training resumes without
    reading what came before, and on another number of ranks with the same rows. Every row comes once an epoch: a batch
    may have the last rows of one epoch and the first of the next. All ranks construct it together; iterating needs no
    communication. A sample of padded rows is read, and checked, when its row is next.

    ``batch`` is int32 of shape (rows of this rank, width), ``lengths`` int32 of shape (rows of this rank, 2): the
    offset of a row's first target, and its number of tokens. Ranks along tp, cp, ep and pp have the same rows.

    Args:
        dataset: samples by number, the same on all ranks: token ids, or (token ids, offset) where the first ``offset``
            are no targets; such as :func:`load_dataset` or mlx-lm's CacheDataset has them.
        batch_size: rows of all ranks in a step; a number or a :class:`BatchRampUp`.
        max_seq_length: tokens in a row at most. The model gets one less, since the targets are shifted by one. Longer
            samples are truncated, with a warning, if rows are padded.
        seed: of the order, from 0; that of :class:`Seeds`, for example.
        shuffle: each epoch in another order; False: the dataset's own, always.
        packed: rows of exactly ``max_seq_length`` tokens, from all samples one after the other; for pretraining. A
            sample then attends to the one before it. False: a sample a row, padded as mlx-lm's iterate_batches does.
        epochs: after which iteration ends, without a last batch that would be smaller; ``None``: it does not end.
        micro_batches: the rows of each rank are a multiple of it: the micro-batches of a step.
        rank_shares: parts of a batch in proportion to these numbers, one for each rank that has rows of its own; or
            "compute": to the speeds that `mlxdist calibrate` has measured. Gradients then need weights when they are
            averaged. ``None``: equal parts.
        skip_steps: steps, counted from 0, whose rows are left out, such as ``range(980, 1000)`` before a loss spike.
        group: ranks that have parts of a batch; ``None`` for those of ``mlxdist.init()``.
        mesh: in place of ``group``: its axes dp and fsdp.

    Attributes:
        step: how many steps are behind, with those that were skipped.
        position: how many rows are behind, of all ranks and epochs.

    Raises:
        InvalidArgument: on all ranks alike: a batch does not divide over the ranks and micro-batches, or is larger than
            an epoch; a sample is not of tokens; an argument has no such value.
        Mismatch: on all ranks: they have different arguments, or datasets of different sizes.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | BatchRampUp,
        max_seq_length: int = 2048,
        *,
        seed: int = 0,
        shuffle: bool = True,
        packed: bool = False,
        epochs: int | None = None,
        micro_batches: int = 1,
        rank_shares: RankShares | None = None,
        skip_steps: Collection[int] = (),
        group: GroupLike | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if group is not None and mesh is not None:
            raise InvalidArgument("Batches: give a group or a mesh, not both")
        self._everyone = group_of(group) if mesh is None else mesh.group
        self._ranks = self._everyone if mesh is None else mesh["dp", "fsdp"]
        self.step = self.position = 0
        self._batch_size, self._shuffle, self._epochs = batch_size, bool(shuffle), epochs
        self._micro_batches, self._rank_shares = micro_batches, rank_shares
        same = [batch_size, max_seq_length, seed, shuffle, packed, epochs, micro_batches, rank_shares, skip_steps]
        with agreed("Batches", self._everyone, same):
            require_counts(
                "Batches",
                max_seq_length=max_seq_length,
                micro_batches=micro_batches,
                epochs=1 if epochs is None else epochs,
            )
            if max_seq_length < 2:
                raise InvalidArgument("Batches: max_seq_length is 1, which leaves no target; take at least 2")
            self._seed = _checked("seed", seed)
            self._skipped = _checked_steps(skip_steps)
            self._check_batch_sizes()
            kind = PackedRows if packed else PaddedRows
            self._rows: Rows = kind(dataset, max_seq_length)
            self._order = {
                "rows": len(self._rows),
                "row_length": max_seq_length if packed else None,
                "shuffle": self._shuffle,
            }
            largest = max(self._sizes())
            if len(self._rows) < largest:
                raise InvalidArgument(
                    f"Batches: a batch of {largest} rows is larger than an epoch, which has {len(self._rows)}; make "
                    f"batch_size smaller, or {'max_seq_length' if packed else 'pack the samples (packed=True)'}"
                )
            same.append(len(self._rows))

    def __iter__(self) -> Iterator[tuple[mx.array, mx.array]]:
        return self

    def __next__(self) -> tuple[mx.array, mx.array]:
        step, position = self.step, self.position
        while step in self._skipped:
            step, position = step + 1, position + self._size_at(position)
        size = self._size_at(position)
        if self._epochs is not None and position + size > self._epochs * len(self._rows):
            raise StopIteration
        own = range(position, position + size)[shard_slice(self._parts(size), self._ranks.rank())]
        batch = self._rows.batch([self._row_at(place) for place in own])
        self.step, self.position = step + 1, position + size
        return batch

    def before(self, step: int) -> int:
        """The :attr:`step` before it was ``step``: one less, and less where steps were left out; from 0."""
        step -= 1
        while step > 0 and step - 1 in self._skipped:
            step -= 1
        return max(step, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self.position // len(self._rows)

    @property
    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: where the next step begins, and in which order. The same on all ranks."""
        return {"step": self.step, "position": self.position, "seed": self._seed, **self._order}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where a ``state`` was, in its order, with its seed. All ranks call it.

        The number of ranks, their shares, ``batch_size`` and ``micro_batches`` may be others than they were.

        Args:
            state: what :attr:`state` was.

        Raises:
            InvalidArgument: on all ranks alike: it is no such state; or rows are made in another way, or of another
                dataset.
        """
        with agreed("Batches.restore", self._everyone, state):
            if not isinstance(state, Mapping):
                raise InvalidArgument(f"Batches.restore: the state is a {type(state).__name__}, not that of Batches")
            if missing := self.state.keys() - state.keys():
                raise InvalidArgument(f"Batches.restore: the state has no {min(missing)}")
            for name, own in self._order.items():
                if state[name] != own:
                    raise InvalidArgument(
                        f"Batches.restore: the state has {name}={state[name]!r:.50}, and these batches {own!r}; give "
                        "the dataset and the arguments with which it was saved"
                    )
            step, position, seed = (_checked(name, state[name]) for name in ("step", "position", "seed"))
        self.step, self.position, self._seed = step, position, seed

    def _size_at(self, position: int) -> int:
        return self._batch_size(position) if isinstance(self._batch_size, BatchRampUp) else int(self._batch_size)

    def _sizes(self) -> Sequence[int]:
        return self._batch_size.sizes if isinstance(self._batch_size, BatchRampUp) else [self._batch_size]

    def _check_batch_sizes(self) -> None:
        unit = self._ranks.size() * self._micro_batches
        for size in self._sizes():
            require_counts("Batches", batch_size=size)
            if self._rank_shares is None and size % unit:
                down = size - size % unit
                raise InvalidArgument(
                    f"Batches: a batch of {size} rows does not divide into {self._ranks.size()} ranks x "
                    f"{self._micro_batches} micro-batches; take {f'{down} or ' if down else ''}{down + unit} rows"
                )
            self._parts(size)

    def _parts(self, size: int) -> list[int]:
        """How many rows of a batch each rank gets."""
        return split_sizes("Batches", size, self._ranks.size(), self._rank_shares, multiple=self._micro_batches)

    def _row_at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._rows))
        return int(_permutation(len(self._rows), self._seed, epoch)[place]) if self._shuffle else place


@lru_cache(maxsize=4)  # two epochs of two datasets
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count) by NumPy's raw bits: these, unlike its permutations, never change (NEP 19)."""
    # Stable, so that the order of equal numbers does not depend on NumPy's algorithm either.
    return np.argsort(np.random.PCG64(mix("epoch", seed, epoch)).random_raw(count), kind="stable")


def _checked(name: str, number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MAX_SEED:
        raise InvalidArgument(f"Batches: {name} is {number!r:.50}, not an integer from 0 to 2**63 - 1")
    return number


def _checked_steps(steps: Any) -> frozenset[int]:
    if isinstance(steps, str) or not isinstance(steps, Collection):
        raise InvalidArgument(f"Batches: skip_steps is {steps!r:.80}, not a list of steps, such as range(980, 1000)")
    return frozenset(_checked("a step of skip_steps", step) for step in steps)
