"""Exchanges values between ranks for a checkpoint, from any thread: by collectives of NumPy arrays."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from mlxdist.base.errors import Error, by_name
from mlxdist.base.json_reader import parse_json
from mlxdist.runtime.group.group import Group, engine_of
from mlxdist.runtime.operations.blobs import gather_blobs

__all__ = ["each", "gather", "together"]

_T = TypeVar("_T")


def gather(value: Any, group: Group) -> list[Any]:
    """Returns the values of all ranks, on every rank. Each must be JSON."""
    if group.size() == 1:
        return [value]
    return [parse_json(blob) for blob in gather_blobs(json.dumps(value).encode(), group)]


def together(function: Callable[[], Any], group: Group) -> list[Any]:
    """Calls ``function``, which does not communicate, on every rank. Returns the results of all, values of JSON.

    Raises:
        Error: on all ranks, if ``function`` raised on one: the error of the lowest such rank, by its name and text. If
            that is this rank, and its exception is no Error, it raises the exception itself.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # the other ranks wait for it
        failure = error
    if group.size() > 1:
        text = "" if failure is None else engine_of(group).located(str(failure))
        kind = None if failure is None else type(failure).__name__
        results = gather([kind, text, result], group)
        first = next((rank for rank, (kind, _, _) in enumerate(results) if kind is not None), None)
        if first is not None and (first != group.rank() or isinstance(failure, Error)):
            raise by_name(results[first][0])(results[first][1]) from failure
    if failure is not None:
        raise failure
    return [result] if group.size() == 1 else [result for _, _, result in results]


def each(function: Callable[[], _T], group: Group) -> _T:
    """Calls ``function`` as :func:`together` does. Its results may be anything, and stay on their ranks."""
    results: list[_T] = []
    together(lambda: results.append(function()), group)
    return results[0]
