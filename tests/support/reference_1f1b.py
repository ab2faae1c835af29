"""The plain pipeline schedule 1F1B in one process, where the ranks are a list: slow, and obviously right.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
arXiv:2104.04473, section 2.2.1: after a few forward passes a rank computes one forward and one backward pass in turn,
so that it keeps the activations of as many micro-batches as there are stages from it to the last, not of all of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

Parameters = dict[str, mx.array]
# Of its parameters, the activation of the stage before (None for the first) and the micro-batch: its own activation.
# That of the last stage is the sum of the losses of the micro-batch's tokens, and how many tokens those are.
Stage = Callable[[Parameters, Any, Any], Any]


def order(stages: int, micro_batches: int, rank: int) -> list[tuple[str, int]]:
    """What a rank computes: F, forward, or B, backward, each with a micro-batch."""
    warm_up = min(stages - 1 - rank, micro_batches)
    steady = micro_batches - warm_up
    actions = [("F", number) for number in range(warm_up)]
    for number in range(steady):
        actions += [("F", warm_up + number), ("B", number)]
    return actions + [("B", number) for number in range(steady, micro_batches)]


def backward(stage: Stage, parameters: Parameters, x: Any, micro_batch: Any, cotangent: mx.array) -> Any:
    """The gradients of the parameters, and that of the activation ``x`` for the stage before. Calls ``stage`` again."""

    def product(parameters: Parameters, x: Any) -> mx.array:
        result = stage(parameters, x, micro_batch)
        return ((result[0] if isinstance(result, tuple) else result) * cotangent).sum()

    if x is None:
        return mx.grad(product)(parameters, x), None
    return mx.grad(product, argnums=(0, 1))(parameters, x)


def train_step(
    stages: Sequence[Stage], parameters: Sequence[Parameters], micro_batches: Sequence[Any]
) -> tuple[tuple[mx.array, mx.array], list[Parameters]]:
    """(the mean loss of all tokens, their number), and its gradients: of each stage those of its parameters."""
    ranks, numbers = range(len(stages)), range(len(micro_batches))
    waiting = [order(len(stages), len(micro_batches), rank) for rank in ranks]
    # What has come, by the rank that it has come to, and the micro-batch.
    inputs: dict[str, dict[tuple[int, int], Any]] = {
        "F": {(0, number): None for number in numbers},
        "B": {(ranks[-1], number): mx.array(1.0) for number in numbers},
    }
    kept: list[dict[int, Any]] = [{} for _ in ranks]  # by micro-batch: the input of its forward pass
    sums = [{path: mx.zeros_like(array) for path, array in own.items()} for own in parameters]
    ends = []
    while any(waiting):
        ready = [rank for rank in ranks if waiting[rank] and (rank, waiting[rank][0][1]) in inputs[waiting[rank][0][0]]]
        assert ready, "the ranks wait for each other"
        for rank in ready:
            kind, number = waiting[rank].pop(0)
            x = inputs[kind].pop((rank, number))
            stage, own, micro_batch = stages[rank], parameters[rank], micro_batches[number]
            if kind == "F":
                kept[rank][number] = x
                assert len(kept[rank]) <= len(stages) - rank
                result = stage(own, x, micro_batch)
                if rank == ranks[-1]:
                    ends.append(result)
                else:
                    inputs["F"][rank + 1, number] = result
            else:
                gradients, cotangent = backward(stage, own, kept[rank].pop(number), micro_batch, x)
                sums[rank] = {path: array + gradients[path] for path, array in sums[rank].items()}
                inputs["B"][rank - 1, number] = cotangent
    losses, tokens = (sum(of_all, mx.array(0)) for of_all in zip(*ends))
    return (losses / tokens, tokens), [{path: array / tokens for path, array in own.items()} for own in sums]
