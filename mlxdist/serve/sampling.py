"""mlx-lm's samplers, each with a random state of its own."""

from collections.abc import Callable, Iterator
from itertools import islice

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.server import _make_sampler

from .decisions import Admission

__all__ = ["sampler_of"]

Sampler = Callable[[mx.array], mx.array]

_AHEAD = 16  # states that are computed together


def sampler_of(request: Admission, tokenizer: object) -> Sampler:
    """Draws what mlx-lm draws for this request alone, after ``mx.random.seed(request.seed)``, from the token on that
    follows those it has generated.

    It does so in a batch, too, and whatever other requests draw in between: on all ranks the same.
    """
    sampler = _make_sampler(request, tokenizer)
    if sampler is greedy_sampler:
        return sampler
    states = islice(_states(request.seed, 1 + (request.sampling.xtc_probability > 0)), request.generated, None)

    def seeded(logprobs: mx.array) -> mx.array:
        mx.random.seed(next(states))
        return sampler(logprobs)

    return seeded


def _states(seed: int, draws: int) -> Iterator[int]:
    """The seed for each token: MLX's random state after ``draws`` draws for each token before it.

    MLX draws by splitting its state in a new state and a key. The state is two words, which are those of a seed.
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
