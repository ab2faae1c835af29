"""Senders and receivers agree here before an array is sent: what one of them rejects is the same error on all."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..base.errors import InvalidArgument, Mismatch
from ..runtime.group.group import Group, engine_of
from .messages import INVALID, recv_json, send_json

__all__ = ["answer", "attempt", "no_cache", "propose"]

T = TypeVar("T")


def propose(said: Any, refusal: Exception | None, peers: Sequence[int], group: Group) -> list[Any]:
    """Sends ``said``, a value of JSON, or why there is none, to receivers, which call :func:`answer`.

    Returns:
        The answer of each receiver, in the order of ``peers``.

    Raises:
        InvalidArgument, Mismatch: on all ranks: there is a ``refusal`` on one.
    """
    for peer in peers:
        send_json({"problem": _problem(refusal, group), "said": said}, peer, group)
    problems, answers = _recv_all(peers, group)
    problem = next(filter(None, problems), None)
    # The third message: what one receiver rejects, all ranks must raise before any rank sends an array.
    for peer in peers:
        send_json(problem, peer, group)
    _raise(problem, refusal)
    return answers


def answer(
    decide: Callable[[list[Any]], list[Any]], refusal: Exception | None, peers: Sequence[int], group: Group
) -> list[Any]:
    """Calls ``decide`` with the senders' proposals; sends each sender its answer, a value of JSON; returns all answers.

    Raises:
        InvalidArgument, Mismatch: on all ranks: there is a ``refusal`` on one, or ``decide`` raises one. Another
            exception of ``decide``, as a malformed proposal causes it, is a Mismatch.
    """
    problems, said = _recv_all(peers, group)
    problem, answers = next(filter(None, [_problem(refusal, group), *problems]), None), [None] * len(peers)
    if problem is None:
        try:
            answers = decide(said)
        except INVALID as error:
            refusal = error if isinstance(error, InvalidArgument) else no_cache(f"ranks {list(peers)}", error)
        except Mismatch as error:
            refusal = error
        problem = _problem(refusal, group)
    for peer, one in zip(peers, answers, strict=True):
        send_json({"problem": problem, "said": one}, peer, group)
    _raise(next(filter(None, [recv_json(peer, group) for peer in peers]), None), refusal)
    return answers


def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Calls ``make`` and returns its result, or the exception that it raises: the other ranks wait for either."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def no_cache(ranks: str, error: Exception) -> Mismatch:
    """The error for a malformed message, or one from an mlx-lm that has other caches."""
    return Mismatch(f"kv: what {ranks} sends is no prompt cache of this mlx-lm: {error!r}")


def _recv_all(peers: Sequence[int], group: Group) -> tuple[list[Any], list[Any]]:
    received = [(peer, recv_json(peer, group)) for peer in peers]
    for peer, one in received:
        if not isinstance(one, dict) or one.keys() != {"problem", "said"}:
            raise no_cache(f"rank {peer}", ValueError(f"{one!r:.100}"))
    return [one["problem"] for _, one in received], [one["said"] for _, one in received]


def _problem(refusal: Exception | None, group: Group) -> list[str] | None:
    """The class and the text of an error, for JSON."""
    if refusal is None:
        return None
    kind = "Mismatch" if isinstance(refusal, Mismatch) else "InvalidArgument"
    return [kind, engine_of(group).located(str(refusal) or type(refusal).__name__)]


def _raise(problem: Any, refusal: Exception | None) -> None:
    if problem is not None:
        kind, text = problem
        raise (Mismatch if kind == "Mismatch" else InvalidArgument)(text) from refusal
