"""mlx-lm's samplers, each with a random state of its own; and a logits processor that mlx-lm does not have."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.server import SamplingArguments, _make_sampler

from .decisions import Admission

__all__ = ["MinTokens", "SeededSampler", "sampler_of"]

Sampler = Callable[[mx.array], mx.array]

_AHEAD = 16  # states that are computed together


class SeededSampler:
    """Draws the tokens that mlx-lm's ``sampler`` draws for one request alone, after ``mx.random.seed(seed)``.

    The draws are the same in a batch, whatever other requests draw in between, and on all ranks.

    Args:
        seeds: a seed for each token, from the first that is sampled here.
    """

    def __init__(self, sampler: Sampler, seeds: Iterator[int]) -> None:
        self._sampler, self._following = sampler, seeds
        self._seeds: list[int] = []  # of the tokens from the first one on
        self._sampled = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draws the next token."""
        self._sampled += 1
        return self.at(self._sampled - 1, logprobs)

    def at(self, index: int, logprobs: mx.array) -> mx.array:
        """Draws the token with this index, from 0. An index may be drawn several times, as for drafts."""
        while len(self._seeds) <= index:
            self._seeds.append(next(self._following))
        mx.random.seed(self._seeds[index])
        return self._sampler(logprobs)


class MinTokens:
    """A logits processor of mlx-lm, which allows no token that ends an answer before it has a number of tokens.

    Args:
        ends: the tokens that end the answer.
        until: the number of tokens, with those of the prompt, from which on they are allowed.
    """

    def __init__(self, ends: Sequence[int], until: int) -> None:
        self._ends, self._until = mx.array(list(ends)), until

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= self._until:
            return logits
        logits[..., self._ends] = -mx.inf
        return logits


def sampler_of(
    request: Admission,
    tokenizer: object,
    adapt: Callable[[SamplingArguments, Sampler], Sampler] = lambda sampling, sampler: sampler,
) -> Sampler:
    """mlx-lm's sampler for a request, with a random state of this request alone; a greedy one needs no state.

    Args:
        adapt: converts mlx-lm's sampler into one for rows that do not have all logits.
    """
    if request.sampling.temperature == 0:  # mlx-lm would use its tokenizer first, for XTC
        return adapt(request.sampling, greedy_sampler)
    sampler = adapt(request.sampling, _make_sampler(request, tokenizer))
    draws = 1 + (request.sampling.xtc_probability > 0)
    return SeededSampler(sampler, islice(_states(request.seed, draws), request.generated, None))


def _states(seed: int, draws: int) -> Iterator[int]:
    """The seed for each token: MLX's random state after ``draws`` draws for each token before it.

    MLX draws by splitting its state in a new state and a key. The state is two words: the two halves of a seed.
    """
    key = mx.random.key(seed)
    while True:
        keys = []
        for _ in range(_AHEAD):
            keys.append(key)
            for _ in range(draws):
                key = mx.random.split(key, stream=mx.cpu)[0]
        for high, low in np.array(mx.stack(keys, stream=mx.cpu)):
            yield int(high) << 32 | int(low)
