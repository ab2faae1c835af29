"""Plans as JSON. What is read is checked as strictly as what `plan_shards` makes: a plan comes from a file."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxdist.base.environment import MAX_RANKS

from .parameters import KINDS, Shard

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["fields_of", "to_json"]

_DTYPES = frozenset(name for name, value in vars(mx).items() if isinstance(value, mx.Dtype))
_SHARD = {field.name for field in dataclasses.fields(Shard)}
_LARGEST = 2**63 - 1
_LONGEST = 1000


def to_json(plan: "Plan") -> str:
    """All fields of the plan, ``shards`` as a list."""
    document = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    document["shards"] = [dataclasses.asdict(shard) for shard in plan.shards.values()]
    return json.dumps(document)


def fields_of(text: str, names: set[str]) -> dict[str, Any]:
    """The fields of a plan, whose ``names`` must all be there. Raises ValueError, which says what is wrong."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_fields(document, names, "it")
    for name in ("tp", "ep"):
        _require(_is_number(document[name], 1, MAX_RANKS), f"{name} must be from 1 to {MAX_RANKS}")
    ranks = document["tp"] * document["ep"]
    _require(ranks <= MAX_RANKS, f"it is for {ranks} ranks, and at most {MAX_RANKS} are possible")
    for name in ("model_type", "how"):
        _require(_is_text(document[name]), f"{name} must be a text that can be printed")
    notes, weights = document["notes"], document["weights"]
    _require(isinstance(notes, list) and all(map(_is_text, notes)), "notes must be a list of texts")
    _require(weights is None or _are_weights(weights, document["tp"]), "weights must be tp positive numbers")
    _require(isinstance(document["shards"], list), "shards must be a list")
    shards = [_shard(fields, ranks) for fields in document["shards"]]
    _require(len({shard.path for shard in shards}) == len(shards), "a parameter is there twice")
    document |= {"shards": {shard.path: shard for shard in shards}, "notes": tuple(notes)}
    return document | {"weights": None if weights is None else tuple(map(float, weights))}


def _shard(fields: Any, ranks: int) -> Shard:
    _require_fields(fields, _SHARD, "a shard")
    path = fields["path"]
    _require(_is_text(path) and path != "", "a path must be a text that can be printed")
    _require(fields["kind"] in KINDS, f"{path}: kind must be one of {', '.join(KINDS)}")
    _require(_is_text(fields["dtype"]) and fields["dtype"] in _DTYPES, f"{path}: MLX has no such dtype")
    _require(_is_text(fields["reason"]), f"{path}: reason must be a text")
    shape, axis, scale = fields["shape"], fields["axis"], fields["scale"]
    _require(isinstance(shape, list) and all(_is_number(size, 0, _LARGEST) for size in shape), f"{path}: no such shape")
    _require(_is_number(axis, 0, max(0, len(shape) - 1)), f"{path}: no such axis")
    _require(type(scale) in (int, float) and 0 < scale <= 1, f"{path}: scale must be above 0 and at most 1")
    ranges = fields["ranges"]
    _require(isinstance(ranges, list) and len(ranges) in (0, ranks), f"{path}: ranges must be there for each rank")
    length = shape[axis] if shape else 0
    whole = tuple(tuple(_range(pair, length, path) for pair in _list(pieces, path)) for pieces in ranges)
    _require(len({len(pieces) for pieces in whole}) <= 1, f"{path}: all ranks must have equally many pieces")
    _require((fields["kind"] == "whole") == (not whole), f"{path}: what is whole has no ranges, and all else has")
    return Shard(**fields | {"shape": tuple(shape), "ranges": whole, "scale": float(scale)})


def _list(pieces: Any, path: str) -> list:
    _require(isinstance(pieces, list) and len(pieces) > 0, f"{path}: a rank's ranges must be a list")
    return pieces


def _range(pair: Any, length: int, path: str) -> tuple[int, int]:
    fits = isinstance(pair, list) and len(pair) == 2 and all(_is_number(place, 0, length) for place in pair)
    _require(fits and pair[0] <= pair[1], f"{path}: {pair!r:.50} is no range within {length}")
    return pair[0], pair[1]


def _are_weights(weights: Any, tp: int) -> bool:
    if not isinstance(weights, list) or len(weights) != tp:
        return False
    return all(type(weight) in (int, float) and 0 < weight < 1e300 for weight in weights)


def _is_number(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST


def _require_fields(found: Any, names: set[str], what: str) -> None:
    right = isinstance(found, dict) and set(found) == names
    _require(right, f"{what} must have the fields {', '.join(sorted(names))}, and no others")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
