"""A token that was sampled, with the log-probabilities that its client asks for."""

import math
from typing import Any

import mlx.core as mx

from .answer import Token

__all__ = ["token_of"]


def token_of(response: Any, top_logprobs: int | None) -> Token:
    """The token of a response of mlx-lm.

    ``top_logprobs``: the number of likely tokens to list; None without log-probabilities.
    """
    if top_logprobs is None:
        return Token(response.token, 0.0, response.finish_reason)
    logprobs: Any = response.logprobs
    top: list[tuple[int, float]] = []
    if top_logprobs > 0:
        likely: Any = mx.argpartition(-logprobs, kth=top_logprobs - 1)[:top_logprobs]
        # A grammar allows fewer tokens; JSON has no infinity.
        found = zip(likely.tolist(), logprobs[likely].tolist())
        top = sorted((each for each in found if math.isfinite(each[1])), key=lambda each: -each[1])
    return Token(response.token, logprobs[response.token].item(), response.finish_reason, tuple(top))
