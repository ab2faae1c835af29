"""Long prompts computed by all ranks together, for a cache that each of them generates from."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of

from .sequence import gather_sequence, shard_sequence

__all__ = ["prefill"]


def prefill(model: nn.Module, prompt: mx.array | Sequence[int], *, group: GroupLike | None = None) -> list[Any]:
    """Computes the cache of a prompt, each rank a shard of it, for ``mlx_lm``'s ``prompt_cache=``.

    Give it all tokens but the last, which generation begins with::

        cache = prefill(model, prompt[:-1])
        generate_step(prompt[-1:], model, prompt_cache=cache)

    Each rank computes 1 / n of the prompt, and holds 1 / n of the activations. The keys and values of all layers are
    then gathered, a layer at a time, so that every rank can generate by itself. Evaluated when it returns.

    Args:
        model: what :func:`context_parallel` has returned, with the same ``group``.
        prompt: the tokens, integers of shape (length,), the same on all ranks. Any length: it is padded, and the
            padding taken from the cache again.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Returns:
        A ``KVCache`` of mlx-lm for each layer, with the full prompt; the same on all ranks.

    Raises:
        InvalidArgument: on all ranks: the prompt is empty or not of one dimension.
        Mismatch: on all ranks: it is not the same on all of them.
        Also the errors of :mod:`mlxdist.runtime.operations.collectives`.
    """
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    group = group_of(group)
    compared: list[object] = []  # as it is behind the block
    with agreed("prefill", group, compared):
        tokens = prompt if isinstance(prompt, mx.array) else mx.array(list(prompt))
        compared.append(tokens.tolist())
        if tokens.ndim != 1 or not tokens.size:
            raise InvalidArgument(f"prefill: the prompt has shape {tokens.shape}, but must be tokens, (length,)")
    padding = -tokens.size % (2 * group.size()) if group.size() > 1 else 0
    shard = shard_sequence(mx.pad(tokens, (0, padding)), 0, group=group)
    cache: list[Any] = [KVCache() for _ in make_prompt_cache(model)]
    model(shard[None], cache=cache)
    for layer in cache:
        if layer.empty():  # it has those of another layer
            continue
        keys, values = (gather_sequence(x, 2, group=group)[:, :, : tokens.size] for x in layer.keys_and_values())
        layer.state = keys, values, tokens.size
        mx.eval(keys, values)
    return cache
