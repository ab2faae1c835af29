"""The ranks of jobs that `mlxdist pull` runs on hosts: a download on one, then the spread to all.

Its argument is JSON: {"step": "fetch" or "spread", "model", "to", "hub", "fetched", "only_shards"}. Each rank prints
lines of JSON after `MARK`: progress, an error, and rank 0 the result.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxdist.base.errors import Error
from mlxdist.base.json_reader import parse_json

from .places import Folder, HubCache, Place

__all__ = ["MARK", "main", "place_of"]

MARK = "mlxdist-pull: "
_PROGRESS_SECONDS = 0.2


def place_of(model: str, to: str, hub: bool) -> Place:
    """The place of a model on this host, or where it will be.

    Args:
        model: the name of a model of the hub, or an absolute path.
        to: the directory to write to, where that is another one; else empty.
        hub: whether it is a name.
    """
    return HubCache(model) if hub else Folder(Path(to or model), Path(model))


def main() -> None:
    arguments = parse_json(sys.argv[1])
    step = _fetch if arguments.pop("step") == "fetch" else _spread
    step(**arguments)


class _Progress:
    """Prints progress, a few times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        if time.monotonic() >= self._next or done == of:
            self._next = time.monotonic() + _PROGRESS_SECONDS
            _tell(what=what, done=done, of=of)


def _tell(**fields: Any) -> None:
    # One write, which the lines of other ranks do not mix with.
    os.write(1, f"{MARK}{json.dumps(fields)}\n".encode())


def _fetch(model: str, **others: Any) -> None:
    from .fetch import fetch

    try:
        fetch(model, _Progress())
    except (Error, OSError) as error:
        _tell(error=str(error), kind=type(error).__name__, rank=0)
        sys.exit(1)


def _spread(model: str, to: str, hub: bool, fetched: bool, only_shards: Mapping[str, Any] | None) -> None:
    """``fetched``: whether the first host has all of it; else another one must. ``only_shards``: of a later job, the
    number of ranks on each of the "hosts", and the "layout" of the model on them."""
    import mlxdist

    from .only_shards import shards_of_hosts
    from .spread import spread

    group = mlxdist.init()
    rank = group.rank()
    try:
        on_progress = _Progress() if rank == 0 else lambda what, done, of: None
        plan_hosts = None if only_shards is None else functools.partial(shards_of_hosts, **only_shards)
        result = spread(group, place_of(model, to, hub), on_progress, fetched or rank > 0, plan_hosts)
    except (Error, OSError) as error:
        _tell(error=str(error), kind=type(error).__name__, rank=rank)
        sys.exit(1)
    if rank == 0:
        _tell(result=asdict(result))


if __name__ == "__main__":
    main()
