"""The tuning of communication in rank 0's file: the algorithm of an operation, and the cost of exchanging tokens.

Rank 0 reads it with :func:`load` and hands it to all ranks as bytes (:func:`pack`, :func:`unpack`): a choice that
differs between ranks is a mismatch. docs/tuning.md describes the format.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.base import tuning_file, validation
from mlxdist.base.environment import ALGORITHMS as SETTINGS
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json

__all__ = ["ALGORITHMS", "OPERATIONS", "TUNED", "Row", "Tuning", "load", "merge", "pack", "read", "unpack"]

# In the order of mlxdist_operation and mlxdist_algorithm in mlxdist.h, which both count from 1.
OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce", "gather", "scatter", "all_to_all",
)  # fmt: skip
# Those that the measurement chooses for: the ring of the other two is for links that leave no choice.
TUNED = tuple(name for name in OPERATIONS if name not in ("gather", "scatter"))
ALGORITHMS = tuple(name for name in SETTINGS if name != "auto")

MAX_ROWS = 4096
MAX_LINKS = 256
MAX_BYTES = 2**64 - 1  # in a row: however large


@dataclass(frozen=True)
class Row:
    """``operation`` on ``ranks`` ranks of ``hosts`` hosts, with up to ``bytes`` bytes of input, uses ``algorithm``."""

    operation: str = validation.checked(validation.one_of(OPERATIONS))
    ranks: int = validation.checked(validation.number(2, MAX_RANKS))
    hosts: int = validation.checked(validation.number(1, MAX_RANKS))
    bytes: int = validation.checked(validation.number(0, MAX_BYTES))
    algorithm: str = validation.checked(validation.one_of(ALGORITHMS))

    @property
    def kind(self) -> tuple[str, int, int]:
        """Operation, ranks and hosts: the first row of a kind that fits the size counts."""
        return self.operation, self.ranks, self.hosts

    def native(self) -> tuple[int, int, int, int, int]:
        """The fields of a ``mlxdist_tuning``, in its order."""
        operation, algorithm = OPERATIONS.index(self.operation) + 1, ALGORITHMS.index(self.algorithm) + 1
        return operation, self.ranks, self.hosts, self.bytes, algorithm


@dataclass(frozen=True)
class Tuning:
    """Sections of the file.

    Attributes:
        expert_links: by provider, number of ranks and of hosts, as `mlxdist.nn.expert_parallel.LinkCosts` takes them.
    """

    algorithms: list[Row] = field(default_factory=list)
    expert_links: list[dict[str, Any]] = field(default_factory=list)


def load(setting: str | None, environ: Mapping[str, str] = os.environ) -> Tuning:
    """The tuning of a job.

    Args:
        setting: the value of MLXDIST_TUNING_FILE.

    Raises:
        InvalidArgument: the file does not exist although it was named, cannot be read, or is malformed.
    """
    path = tuning_file.find(setting, environ)
    return Tuning() if path is None else read(path)


def read(path: Path) -> Tuning:
    """Reads a tuning file. Raises InvalidArgument: the file cannot be read, or is malformed."""
    rows = tuning_file.read_section(path, "algorithms", _check_rows, [])
    return Tuning(rows, tuning_file.read_section(path, "expert_links", _check_links, []))


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows, and those old ones that are for another operation or number of ranks or hosts."""
    measured = {row.kind for row in new}
    kept = [row for row in old if row.kind not in measured]
    return sorted([*kept, *new], key=lambda row: (row.ranks, row.hosts, OPERATIONS.index(row.operation), row.bytes))


def sections(tuning: Tuning) -> dict[str, Any]:
    """The tuning as sections of the file.

    Raises:
        InvalidArgument: `read` would reject it.
    """
    found = {"algorithms": [vars(row) for row in tuning.algorithms], "expert_links": tuning.expert_links}
    try:
        _checked(found)
    except ValueError as error:
        raise InvalidArgument(f"tuning: {error}") from None
    return found


def pack(tuning: Tuning) -> bytes:
    """The tuning as bytes, for :func:`unpack` on another rank."""
    return json.dumps(sections(tuning), separators=(",", ":")).encode()


def unpack(data: bytes) -> Tuning:
    """The tuning that :func:`pack` has packed.

    Raises:
        InvalidArgument: these bytes are not from :func:`pack` of this version.
    """
    try:
        return _checked(parse_json(data))
    except ValueError as error:
        raise InvalidArgument(
            f"the tuning that rank 0 sent is malformed: {error}; install the same mlxdist on all hosts"
        ) from None


def _check_rows(rows: Any) -> list[Row]:
    """The rows of a table of algorithms. Raises ValueError where it is malformed."""
    if not isinstance(rows, list) or len(rows) > MAX_ROWS:
        raise ValueError(f"it is not a list of at most {MAX_ROWS} rows")
    found = [_row(place, row) for place, row in enumerate(rows, 1)]
    # The first row that fits counts; one that can never be first is a mistake in the table.
    largest: dict[tuple[str, int, int], tuple[int, int]] = {}
    for place, row in enumerate(found, 1):
        size, before = largest.get(row.kind, (-1, 0))
        if row.bytes <= size:
            raise ValueError(
                f"row {place} never counts, because row {before} is for {row.operation} on {row.ranks} ranks "
                f"(hosts: {row.hosts}) too, with {size} bytes"
            )
        largest[row.kind] = row.bytes, place
    return found


def _row(place: int, row: Any) -> Row:
    if not isinstance(row, dict) or row.keys() != Row.__dataclass_fields__.keys():
        raise ValueError(f"row {place} must have the fields {', '.join(Row.__dataclass_fields__)}, and no others")
    try:
        found = validation.build(Row, row)
        _check_shape(found.ranks, found.hosts)
    except ValueError as error:
        raise ValueError(f"row {place}: {error}") from None
    return found


def _check_shape(ranks: int, hosts: int) -> None:
    if hosts > ranks:
        raise ValueError(f"hosts is {hosts}, more than the {ranks} ranks")


_POSITIVE = validation.positive(1e15)
_COST = {"latency": _POSITIVE, "bandwidth": _POSITIVE}
_LINK = {
    "provider": validation.text(),
    "ranks": validation.number(2, MAX_RANKS),
    "hosts": validation.number(1, MAX_RANKS),
    "plan": _POSITIVE,
    "costs": validation.map_of(validation.object_of(_COST), 16),
}


def _check_links(links: Any) -> list[dict[str, Any]]:
    found = validation.list_of(validation.object_of(_LINK), MAX_LINKS)("expert_links", links)
    for link in found:
        _check_shape(link["ranks"], link["hosts"])
    return list(found)


def _checked(found: Any) -> Tuning:
    if not isinstance(found, dict) or found.keys() != {"algorithms", "expert_links"}:
        raise ValueError("it has not the fields algorithms, expert_links")
    return Tuning(_check_rows(found["algorithms"]), _check_links(found["expert_links"]))
