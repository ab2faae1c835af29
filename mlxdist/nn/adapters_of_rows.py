"""Which adapter each row of a batch has, in a call of a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

__all__ = ["adapters_of_rows", "given_adapters"]

# What was given, and on the device; None: no row has an adapter.
_of_rows: ContextVar[tuple[Sequence[int], mx.array] | None] = ContextVar("adapters of rows", default=None)


@contextmanager
def adapters_of_rows(adapters: Sequence[int]) -> Iterator[None]:
    """A ``with`` block in which a model of ``load_sharded(adapter_path=[...])`` is called with a batch.

    Where no row has an adapter, as outside of the block, the model computes as without adapters.

    Args:
        adapters: one number for each row of the batch: 0 for no adapter, 1 for the first of the list.

    Raises:
        InvalidArgument: where the model is called: there is no adapter with that number, or another number of rows.
    """
    before = _of_rows.set((adapters, mx.array(list(adapters))) if any(adapters) else None)
    try:
        yield
    finally:
        _of_rows.reset(before)


def given_adapters() -> tuple[list[int], mx.array | None]:
    """Returns what :func:`adapters_of_rows` says here, and on the device; no numbers: no row has an adapter."""
    given = _of_rows.get()
    return ([], None) if given is None else (list(given[0]), given[1])
