"""Ranks that share a model compare what they call it with, such as tokens that each rank samples for itself.

Ranks that sample without a common seed, or have other prompts of one length, would add up activations of different
texts, and each would go on with a text of its own. So the arrays are compared where they come in, inside the graph: one
all_gather of 24 bytes for each, which the embedding depends on. The ranks compute nothing from tokens that differ.
Stages send a hash with the activations that they send anyway.

Why not otherwise:
- To send rank 0's tokens to all: what the generators of mlx-lm return on other ranks is what these have sampled.
- To seed MLX's random state: it is the program's.
- To compare behind the last sum, where no rank would wait: chunks of a prompt are evaluated without logits.
- NaN where ranks differ: it names neither ranks nor tokens, and samplers draw from it.
"""

from functools import cache
from typing import Any, TypeVar
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn

from mlxdist.runtime.group.group import Group, engine_of
from mlxdist.runtime.native import bridge

from .adapters_of_rows import given_adapters
from .interception import become, derived

__all__ = ["compare_inputs", "inputs_of", "require_equal"]

M = TypeVar("M", bound=nn.Module)

_ADVICE = (
    "give all ranks the same prompts, embeddings and adapters_of_rows, and seed them alike before they sample "
    "(mx.random.seed(0)), or give all the tokens of rank 0 (sampler=lambda x: mlxdist.broadcast(your_sampler(x), 0))"
)


def compare_inputs(model: M, group: Group) -> M:
    """Makes ``model(...)`` compare its arrays over the ranks of ``group``, in place."""
    if group.size() > 1:
        shared: Any = model
        shared._input_group = group
        become(shared, _comparing(type(model)))
    return model


def require_equal(value: Any, group: Group) -> Any:
    """Returns ``value``. Evaluating it, if it is an array, raises a Mismatch on all ranks where a rank has another.

    Args:
        value: any dtype and shape; its gradient is the cotangent itself. Other values than arrays are not compared.
        group: the ranks, which all call it.
    """
    if not isinstance(value, mx.array) or value.size == 0:
        return value
    adapters, _ = given_adapters()
    also = crc32(repr(adapters).encode())
    return bridge.require_equal(value, engine_of(group).connection, also, _ADVICE)


def inputs_of(*arguments: Any) -> list[mx.array]:
    """The arrays of a model's call that ranks compare: those among the arguments, and the adapters of the rows."""
    return [x for x in (*arguments, given_adapters()[1]) if isinstance(x, mx.array)]


@cache
def _comparing(kind: Any) -> type[nn.Module]:
    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        group = self._input_group
        equal = [require_equal(value, group) for value in arguments]
        return kind.__call__(self, *equal, **{name: require_equal(value, group) for name, value in keywords.items()})

    return derived(kind, {"__call__": __call__})
