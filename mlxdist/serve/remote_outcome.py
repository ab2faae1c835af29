"""The results of a step of the decode ranks, as a message from the first of them to rank 0."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxdist.base.errors import Mismatch
from mlxdist.base.json_reader import parse_json
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.point_to_point import recv, send

from .answer import Token
from .decisions import MAX_TOP_LOGPROBS
from .token_logprobs import token_of
from .worker import Outcome

__all__ = ["RemoteToken", "recv_outcome", "send_outcome"]

_FRAME = 1024  # bytes of the first message; most results need no second one
_LENGTH = 8  # of these, for the length of the text
_MAX_BYTES = 1 << 24  # a token with as many likely ones as a request may ask for has 1 KiB
_INVALID = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class RemoteToken:
    """A response of mlx-lm on decode ranks.

    Attributes:
        uid, token, finish_reason: as there.
        logprob, top: as in :class:`Token`, if rank 0 reads log-probabilities.
    """

    uid: int
    token: int
    finish_reason: str | None
    logprob: float
    top: tuple[tuple[int, float], ...]

    def with_likely(self, number: int | None) -> Token:
        """The token with that number of likely ones; None: without log-probabilities."""
        if number is None:
            return Token(self.token, 0.0, self.finish_reason)
        return Token(self.token, self.logprob, self.finish_reason, self.top[:number])


def send_outcome(outcome: Outcome, digest: int, listed: Collection[int], group: Group) -> None:
    """Sends the results of a step, but for the progress of prompts, to rank 0 of the group.

    ``digest``: that of :class:`Worker`. ``listed``: requests whose log-probabilities rank 0 reads.
    """
    text = json.dumps(
        {
            "digest": digest,
            "received": [outcome.received, outcome.received_bytes],
            "cached": [*outcome.cached.items()],
            "tokens": [_described(response, response.uid in listed) for response in outcome.tokens],
            "scores": [
                [uid, [[one.token, one.logprob, one.top] for one in tokens]]
                for uid, tokens in outcome.prompt_logprobs.items()
            ],
            "failed": [*outcome.failed.items()],
        }
    ).encode()
    message = len(text).to_bytes(_LENGTH, "little") + text
    head = np.frombuffer(message[:_FRAME].ljust(_FRAME, b"\0"), np.uint8)
    send(head, 0, group=group)
    if len(message) > _FRAME:
        send(np.frombuffer(message[_FRAME:], np.uint8), 0, group=group)


def recv_outcome(group: Group) -> tuple[Outcome, int]:
    """The results of a step and the digest that rank 1 of the group sends.

    Raises:
        Mismatch: it sends something else.
    """
    message = np.asarray(recv([_FRAME], np.uint8, 1, group=group)).tobytes()
    length = int.from_bytes(message[:_LENGTH], "little")
    if length > _MAX_BYTES:
        raise Mismatch(f"serve: the results of the decode ranks have {length} bytes, at most {_MAX_BYTES} are allowed")
    left = _LENGTH + length - _FRAME
    if left > 0:
        message += np.asarray(recv([left], np.uint8, 1, group=group)).tobytes()
    try:
        return _read(parse_json(message[_LENGTH : _LENGTH + length]))
    except _INVALID as error:
        raise Mismatch(f"serve: the decode ranks have sent no results of a step: {error!r:.200}") from error


def _described(response: Any, is_listed: bool) -> list[Any]:
    likely = min(MAX_TOP_LOGPROBS, response.logprobs.shape[-1]) if is_listed else None
    token = token_of(response, likely)
    return [response.uid, token.token, token.finish_reason, token.logprob, token.top]


def _read(said: Any) -> tuple[Outcome, int]:
    received, received_bytes = map(int, said["received"])
    outcome = Outcome(
        cached={int(uid): int(tokens) for uid, tokens in said["cached"]},
        prompt_logprobs={
            int(uid): [Token(token, logprob, None, _pairs(top)) for token, logprob, top in tokens]
            for uid, tokens in said["scores"]
        },
        tokens=[
            RemoteToken(uid, token, reason, logprob, _pairs(top)) for uid, token, reason, logprob, top in said["tokens"]
        ],
        failed={int(uid): str(reason) for uid, reason in said["failed"]},
        received=received,
        received_bytes=received_bytes,
    )
    return outcome, int(said["digest"])


def _pairs(top: Any) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), float(logprob)) for token, logprob in top)
