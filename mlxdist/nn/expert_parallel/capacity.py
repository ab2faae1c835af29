"""Dropping on purpose: no expert takes more than its capacity (Lepikhin et al. 2020, "GShard", arXiv:2006.16668)."""

import math

import mlx.core as mx

__all__ = ["capacity", "limit"]


def capacity(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """How many of the ``tokens`` an expert takes: ``factor`` times the mean load, rounded up."""
    return math.ceil(tokens * top_k / num_experts * factor)


def limit(indices: mx.array, num_experts: int, factor: float) -> mx.array:
    """``indices``, (tokens, k), with -1 where the expert is full. Lazy.

    All first choices come before all second ones, and among equal choices the earlier token. Numbers that are no
    expert stay.
    """
    tokens, k = indices.shape
    if indices.size == 0:
        return indices
    selected = indices.T.reshape(-1).astype(mx.int64)
    count = selected.size
    order = mx.argsort(selected * count + mx.arange(count, dtype=mx.int64))  # distinct numbers: no ties to break
    ascending = selected[order]
    first = mx.argmax(ascending[None, :] == mx.arange(num_experts)[:, None], axis=1)
    ahead = mx.arange(count) - first[mx.clip(ascending, 0, num_experts - 1)]
    fits = (ahead < capacity(tokens, k, num_experts, factor)) | (ascending < 0) | (ascending >= num_experts)
    return mx.where(fits[mx.argsort(order)].reshape(k, tokens).T, indices, -1)
