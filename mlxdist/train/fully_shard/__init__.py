"""Fully sharded training (ZeRO): each rank holds a shard of the parameters, gradients and optimizer state.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.

fully_shard.py  fully_shard: makes units of a model's layers
unit.py         Unit: parameters that are gathered and whose gradients are reduced as one, and prefetched
flat_shards.py  FlatShards: the vector that the parameters of a unit are shards of
"""

from .fully_shard import fully_shard

__all__ = ["fully_shard"]
