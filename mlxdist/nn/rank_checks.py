"""Checks that the ranks agree before a payload moves: one small message, and the same error on all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from mlxdist.base.errors import InvalidArgument, Mismatch
from mlxdist.runtime.group.group import Group, engine_of
from mlxdist.runtime.operations.collectives import all_gather

__all__ = ["agree", "agreed", "described", "on_host", "texts"]

_TEXT_BYTES = 800  # of a refusal; with the rank behind it less than the engine keeps of an error
_SHOWN_BYTES = 300  # of what the ranks disagree about


def agree(
    name: str, group: Group, problem: str | Mismatch | None, equal: Mapping[str, object], facts: Sequence[int] = ()
) -> np.ndarray:
    """All ranks' ``facts``, once it is certain that none has a problem. Collective: one all_gather, awaited.

    It is an operation of MLX, so it keeps its place among those that ``mx.async_eval`` has started.

    Args:
        name: what the messages begin with.
        problem: what is wrong with this rank's arguments; ``None`` for nothing. A Mismatch with other ranks stays one.
        equal: what must be the same on all ranks, as text, by what it is called in messages; of a mapping, such as
            :func:`described` returns, what is in it, by path.
        facts: numbers of this rank that the other ranks need. How many there are is the same on all ranks.

    Returns:
        int64 of shape (ranks, len(facts)).

    Raises:
        InvalidArgument: a rank has a problem; the same text on all ranks.
        Mismatch: the ranks disagree; the text names the first path that differs. The same on all ranks.
    """
    lines = dict(_lines(equal)) if group.size() > 1 else {}
    kind = 0 if problem is None else 2 if isinstance(problem, Mismatch) else 1
    # One row of fixed length for the common case; texts are exchanged only where something is wrong.
    table = _gathered([kind, _digest(repr(sorted(lines.items()))), *facts], group)
    kinds, digests = table[:, 0], table[:, 1]
    if kinds.any():
        text = _shortened(str(problem or ""), _TEXT_BYTES)
        if kind == 1:
            text = engine_of(group).located(text)
        first = int(np.argmax(kinds > 0))
        raise (Mismatch if kinds[first] == 2 else InvalidArgument)(texts(text, group)[first])
    if (digests != digests[0]).any():
        raise Mismatch(_difference(name, lines, group))
    return table[:, 2:]


@contextmanager
def agreed(name: str, group: Group, *values: object) -> Iterator[None]:
    """A ``with`` block of checks whose outcome, and ``values``, are then compared over the ranks by :func:`agree`.

    Nothing in the block may communicate. ``values`` are compared by their ``repr``, and mappings by what is in them, as
    it is behind the block. In a group of one the block is all there is.

    Raises:
        InvalidArgument: on every rank, if the block raised an exception on one (this one's own keeps its class there),
            with the text of the lowest such rank.
        Mismatch: on every rank, if ``values`` differ, or the block raised one.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:  # the other ranks wait for the outcome
        refusal = error
    if group.size() > 1:
        text = None if refusal is None else str(refusal) or type(refusal).__name__
        equal: dict[str, object] = {"arguments": repr([value for value in values if not isinstance(value, Mapping)])}
        for value in values:
            equal |= value if isinstance(value, Mapping) else {}
        try:
            agree(name, group, refusal if isinstance(refusal, Mismatch) else text, equal)
        except (InvalidArgument, Mismatch) as error:
            if refusal is None or isinstance(refusal, InvalidArgument | Mismatch):
                raise error from refusal
    if refusal is not None:
        raise refusal


def described(module: object, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, object]:
    """The properties of a module that must be the same on all ranks, for :func:`agreed`: its class, and of each
    parameter shape, dtype and whether it is frozen; not values. ``shapes``: in full, where ranks hold shards."""
    if not isinstance(module, nn.Module):
        return {"module": type(module).__name__}
    # Some models of mlx-lm are made without nn.Module's own attributes, and have no trainable_parameters().
    frozen = {
        f"{path}.{name}".lstrip(".") for path, one in module.named_modules() for name in getattr(one, "_no_grad", ())
    }
    arrays: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    found: dict[str, object] = {"module": type(module).__name__}
    for path, array in arrays.items():
        shape, dtype = list(shapes[path] if shapes else array.shape), str(array.dtype).removeprefix("mlx.core.")
        is_frozen = path in frozen or path.rpartition(".")[0] in frozen  # of a parameter that is a list
        found[f"parameter {path}"] = f"{dtype} {shape}{', frozen' if is_frozen else ''}"
    return found


def on_host(array: mx.array) -> np.ndarray | None:
    """``array`` as NumPy has it, evaluated; ``None`` while ``mx.compile`` or ``mx.vmap`` traces, where it has no value.

    In ``mx.grad`` it has one.
    """
    try:
        return np.array(mx.stop_gradient(array))
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        return None


def _lines(equal: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values that are compared, as (path, text)."""
    for name, value in equal.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name} ")
        else:
            yield prefix + name, str(value)


def _difference(name: str, lines: dict[str, str], group: Group) -> str:
    """The first path that not all ranks have, or not with the same text. Collective.

    In the order in which rank 0 gives them, or in alphabetic order where the ranks have other paths.
    """
    paths = sorted(lines)
    most = int(_gathered([len(paths)], group).max())
    rows = _gathered([*(_digest(f"{path}\0{lines[path]}") for path in paths), *[0] * (most - len(paths))], group)
    differing = np.flatnonzero((rows != rows[0]).any(axis=0))
    known = _gathered([_digest("\0".join(paths))], group)
    if (known == known[0]).all():
        differs = {paths[place] for place in differing}
        path = texts(next(path for path in lines if path in differs), group)[0]
    else:
        path = min(filter(None, texts(paths[differing[0]] if differing[0] < len(paths) else "", group)))
    own = lines.get(path, "nothing")
    rows = _gathered([_digest(own)], group)
    rank = int(np.argmax(rows[:, 0] != rows[0, 0]))
    said = texts(_shortened(own, _SHOWN_BYTES), group)
    return f"{name}: the ranks disagree about the {path}: {said[0]} on rank 0, {said[rank]} on rank {rank}"


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _gathered(row: Sequence[int], group: Group) -> np.ndarray:
    own = np.array([row], np.int64)
    return own if group.size() == 1 else np.array(all_gather(mx.array(own), group=group))


def texts(text: str, group: Group) -> list[str]:
    """All ranks' ``text``, cut to 1024 bytes. Collective: one all_gather, awaited."""
    rows = _gathered(np.frombuffer(text.encode()[:1024].ljust(1024, b"\0"), np.int64).tolist(), group)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


def _shortened(text: str, most: int) -> str:
    """``text`` in at most that many bytes, with dots for its middle, if it is longer."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    half = most // 2 - 2
    return f"{encoded[:half].decode(errors='ignore')} ... {encoded[-half:].decode(errors='ignore')}"
