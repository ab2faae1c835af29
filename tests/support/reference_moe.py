"""The plain dense mixture of experts in NumPy: slow, and obviously right.

What every expert-parallel layer is compared with, on one process, in float64.
"""

from __future__ import annotations

import math

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def experts(x: np.ndarray, indices: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Gated experts with SiLU, weights (experts, out, in), on tokens (tokens, d): (tokens, k, d).

    The result of an index of -1 is zero.
    """
    x = x.astype(np.float64)
    out = np.zeros((*indices.shape, down.shape[1]))
    for expert in range(len(gate)):
        tokens, slots = np.nonzero(indices == expert)
        rows = x[tokens]
        out[tokens, slots] = (silu(rows @ gate[expert].T) * (rows @ up[expert].T)) @ down[expert].T
    return out


def mixture(y: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Results (tokens, k, d) weighted by scores (tokens, k) and added up."""
    return (y * scores[..., None]).sum(axis=1)


def limited(indices: np.ndarray, num_experts: int, factor: float) -> np.ndarray:
    """``indices`` with -1 where an expert has had its share: first choices first, then earlier tokens."""
    tokens, k = indices.shape
    room = [math.ceil(tokens * k / num_experts * factor)] * num_experts
    kept = np.full_like(indices, -1)
    for choice in range(k):
        for token in range(tokens):
            expert = indices[token, choice]
            if room[expert] > 0:
                room[expert] -= 1
                kept[token, choice] = expert
    return kept


def routing(kind: str, tokens: int, k: int, num_experts: int, seed: list[int]) -> np.ndarray:
    """Experts of tokens, (tokens, k): "random" distinct ones, "one" for all, "none" for expert 0."""
    random = np.random.default_rng(seed)
    if kind == "one":
        return np.full((tokens, k), num_experts - 1)
    first = 1 if kind == "none" and num_experts > k else 0
    selected = [first + random.permutation(num_experts - first)[:k] for _ in range(tokens)]
    return np.array(selected, np.int64).reshape(tokens, k)
