"""What the ranks of `mlxdist bench kv` measure: prompt caches from rank 0 to rank 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import mlxdist
from mlxdist import kv

from .operations import count_off
from .pipelines import make_qwen2
from .rank import time_case
from .timing import Work, interleave

__all__ = ["PromptCaches"]

TOLERANCE = 1e-5  # of the largest element
_VOCABULARY = 64


class PromptCaches:
    """Cases: operation "transfer" or "first token", hidden, layers, tokens."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.is_sender = world, world.rank() == 0
        self.take = partial(interleave, repeats=parameters["repeats"], warm_up=2, calls=1)

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        model = make_qwen2(case["hidden"], case["layers"], _VOCABULARY)
        prompt = mx.random.randint(0, _VOCABULARY, (1, case["tokens"]), key=mx.random.key(0))
        cache = _computed(model, prompt)
        expected = _arrays(cache)
        mx.eval(expected)
        if case["operation"] == "transfer":
            return self._transfer(case, model, cache, expected)
        return self._first_token(case, model, prompt)

    def _transfer(
        self, case: dict[str, Any], model: nn.Module, cache: list[Any], expected: Sequence[mx.array]
    ) -> list[dict[str, Any]]:
        def by_kv() -> list[mx.array]:
            if self.is_sender:
                kv.send(cache, 1, model=model)
                return []
            return _arrays(kv.recv(0, model=model))

        def by_messages() -> list[mx.array]:
            if self.is_sender:
                arrays: Any = [mlxdist.send(x, 1) for x in map(mx.contiguous, expected)]
            else:
                arrays = [mlxdist.recv(x.shape, x.dtype, 0) for x in expected]
            for x in arrays:
                mx.async_eval(x)  # one by one, in the same order on both
            mx.eval(arrays)
            return [] if self.is_sender else arrays

        works = {name: self._work(call, expected) for name, call in (("kv", by_kv), ("messages", by_messages))}
        return time_case(self.world, case, works, self.take, moved=sum(x.nbytes for x in expected))

    def _first_token(self, case: dict[str, Any], model: nn.Module, prompt: mx.array) -> list[dict[str, Any]]:
        def split() -> list[mx.array]:
            if self.is_sender:
                kv.send(_computed(model, prompt[:, :-1]), 1, model=model)
                return []
            return [_evaluated(model(prompt[:, -1:], cache=kv.recv(0, model=model)))]

        def alone() -> list[mx.array]:
            if not self.is_sender:
                return []
            cache = _computed(model, prompt[:, :-1])
            mx.eval(_arrays(cache))
            return [_evaluated(model(prompt[:, -1:], cache=cache))]

        cache = _computed(model, prompt[:, :-1])
        expected = [_evaluated(model(prompt[:, -1:], cache=cache))]
        works = {name: self._work(call, expected) for name, call in (("split", split), ("alone", alone))}
        return time_case(self.world, case, works, self.take)

    def _work(self, call: Callable[[], list[mx.array]], expected: Sequence[mx.array]) -> Work:
        """``call`` returns arrays on one of the ranks, which are compared."""
        wrong = sum(count_off(a, TOLERANCE, b) for a, b in zip(expected, call()))
        return Work(call, wrong=partial(int, wrong))


def _computed(model: nn.Module, tokens: mx.array) -> list[Any]:
    """The cache of a prompt, lazy."""
    cache = make_prompt_cache(model)
    model(tokens, cache=cache)
    return cache


def _arrays(cache: list[Any]) -> list[mx.array]:
    """The tokens' keys and values, without the room that a cache has for more."""
    return [x[..., : layer.offset, :] for layer in cache for x in (layer.keys, layer.values)]


def _evaluated(x: mx.array) -> mx.array:
    mx.eval(x)
    return x
