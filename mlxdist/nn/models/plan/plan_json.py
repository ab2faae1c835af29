"""Reads the JSON of a plan, which comes from a file: it is checked as strictly as what `plan_shards` makes."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxdist.base import validation
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.json_reader import parse_json

from .parameters import KINDS, Shard

__all__ = ["read_plan"]

_DTYPES = sorted(name for name, value in vars(mx).items() if isinstance(value, mx.Dtype))
_LARGEST = 2**63 - 1
_LONGEST = 1000  # text, and lists that are not of parameters
_MAX_SHARDS = 10**7


_TEXT = validation.plain_text(_LONGEST, steering="")
_PIECE = validation.row_of(validation.number(0, _LARGEST), validation.number(0, _LARGEST))
_SHARD: Mapping[str, validation.Check] = {
    "path": _TEXT,
    "kind": validation.one_of(KINDS),
    "shape": validation.list_of(validation.number(0, _LARGEST), _LONGEST),
    "dtype": validation.one_of(_DTYPES),
    "axis": validation.number(0, _LONGEST),
    "ranges": validation.list_of(validation.list_of(_PIECE, _LARGEST), MAX_RANKS),
    "scale": validation.positive(1),
    "reason": _TEXT,
}
_PLAN: Mapping[str, validation.Check] = {
    "tp": validation.number(1, MAX_RANKS),
    "ep": validation.number(1, MAX_RANKS),
    "rank_shares": validation.or_null(validation.list_of(validation.positive(1e300), MAX_RANKS)),
    "shards": validation.list_of(lambda _, value: _exactly(_SHARD, value), _MAX_SHARDS),
    "model_type": _TEXT,
    "how": _TEXT,
    "notes": validation.list_of(_TEXT, _LONGEST),
}


def read_plan(text: str) -> dict[str, Any]:
    """The fields of a plan, ``shards`` as a list of `Shard`. Raises ValueError, which says what is wrong."""
    fields = _exactly(_PLAN, parse_json(text))
    ranks, shares = fields["tp"] * fields["ep"], fields["rank_shares"]
    _require(ranks <= MAX_RANKS, f"it is for {ranks} ranks, and at most {MAX_RANKS} are possible")
    _require(shares is None or len(shares) == fields["tp"], "rank_shares must be tp positive numbers")
    shards = [Shard(**shard) for shard in fields["shards"]]
    for shard in shards:
        _check(shard, ranks)
    _require(len({shard.path for shard in shards}) == len(shards), "a parameter is there twice")
    return fields | {"shards": shards}


def _check(shard: Shard, ranks: int) -> None:
    """Checks the fields of a shard against each other."""
    path, shape = shard.path, shard.shape
    _require(path != "", "a path is empty")
    _require(shard.axis <= max(0, len(shape) - 1), f"{path}: no such axis")
    _require(len(shard.ranges) in (0, ranks), f"{path}: ranges must be there for each rank")
    length = shape[shard.axis] if shape else 0
    for pieces in shard.ranges:
        _require(len(pieces) == len(shard.ranges[0]) > 0, f"{path}: all ranks must have equally many pieces")
        for piece in pieces:
            _require(piece[0] <= piece[1] <= length, f"{path}: {list(piece)!r:.50} is no range within {length}")
    _require((shard.kind == "full") == (not shard.ranges), f"{path}: what is full has no ranges, and all else has")


def _exactly(checks: Mapping[str, validation.Check], value: Any) -> dict[str, Any]:
    fields = validation.fields_of(checks, value)
    if more := value.keys() - fields.keys():
        raise ValueError(f"{min(more)!r:.50} is no field of it; {validation.suggestion(min(more), checks)}")
    return fields


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
