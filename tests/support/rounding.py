"""Weights that are rounded another way. An answer may change with them where ranks may change it, too."""

import mlx.core as mx
from mlx.utils import tree_map

__all__ = ["SEEDS", "rounded_again"]

SEEDS = range(1, 9)


def rounded_again(weights: dict, seed: int) -> dict:
    """The weights, float32 arrays in any tree, each rounded up or down by one more bit or not."""
    mx.random.seed(seed)
    return tree_map(lambda array: array * (1 + 2**-23 * mx.random.randint(-1, 2, array.shape)), weights)
