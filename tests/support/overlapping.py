"""Requests that overlap in the batch of `mlxdist serve`, and what mlx-lm generates for each of them alone."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from serving import PLAIN

from mlxdist.serve.decisions import Admission, Decisions
from mlxdist.serve.worker import Worker

__all__ = ["ALL", "admission", "alone", "overlapping", "run"]

ALL = 2**32 - 1  # tokens that the prefix cache may have of a request that ends

# Of several chunks, of one, and one that is cancelled in mid-way; the fourth is the first one's with its answer.
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21], [33, 34, 35, 36, 37])
CANCELLED, ANSWER, MORE = 1, 6, [40, 41]
GREEDY = replace(PLAIN.sampling, temperature=0.0)


def admission(number: int, tokens: list[int], **fields: object) -> Admission:
    return replace(PLAIN, number=number, prompt=tokens, segments=[len(tokens)], max_tokens=20, **fields)


def run(worker: Worker, *rounds: list[Admission], cached: dict[int, int] | None = None, cancel: int | None = None):
    """The tokens of each request, where each of ``rounds`` is admitted one step later; ``cancel`` leaves after its
    second token."""
    found: dict[int, list[int]] = {}
    step = left = 0
    end: list[tuple[int, int]] = []
    cached = {} if cached is None else cached
    while left or end or step < len(rounds):
        admit = rounds[step] if step < len(rounds) else []
        outcome = worker.step(Decisions(step, worker.digest, end, admit))
        cached |= outcome.cached
        for response in outcome.tokens:
            found.setdefault(response.uid, []).append(response.token)
        end = [(response.uid, ALL) for response in outcome.tokens if response.finish_reason is not None]
        if cancel is not None and len(found.get(cancel, [])) == 2:
            end.append((cancel, ALL))
            cancel = None
        left += len(admit) - len(end)
        step += 1
    return found


def alone(model: nn.Module, make_cache: Callable[[nn.Module], list] = make_prompt_cache) -> list[list[int]]:
    """The tokens of each of the four, without batches, chunks, caches of prefixes or ranks."""
    found: list[list[int]] = []
    for prompt in [*PROMPTS, None]:
        tokens = mx.array(prompt or PROMPTS[0] + found[0] + MORE)
        steps = generate_step(tokens, model, max_tokens=ANSWER, prompt_cache=make_cache(model))
        found.append([token for token, _ in steps])
    found[CANCELLED] = found[CANCELLED][:2]
    return found


def overlapping(worker: Worker, answer: list[int]) -> tuple[list[list[int]], int]:
    """The same of a worker, and how many tokens of the fourth prompt its prefix cache has. ``answer``: to the first."""
    prompts = [*PROMPTS, PROMPTS[0] + answer + MORE]
    requests = (admission(number, prompt, sampling=GREEDY) for number, prompt in enumerate(prompts))
    *first, again = [[replace(request, max_tokens=ANSWER)] for request in requests]
    found = run(worker, *first, cancel=CANCELLED)
    cached: dict[int, int] = {}
    found |= run(worker, again, cached=cached)
    return [found[number] for number in range(len(PROMPTS) + 1)], cached[len(PROMPTS)]
