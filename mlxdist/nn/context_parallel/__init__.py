"""Attention over sequences of which every rank holds a shard."""

from .ring_attention import ring_attention
from .sequence import gather_sequence, shard_sequence
from .ulysses import ulysses_attention

__all__ = ["gather_sequence", "ring_attention", "shard_sequence", "ulysses_attention"]
