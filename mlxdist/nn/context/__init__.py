"""Attention over sequences of which every rank holds a shard."""

from .model import context_parallel
from .prefill import prefill
from .ring_attention import ring_attention
from .sequence import gather_sequence, shard_sequence
from .ulysses import ulysses_attention

__all__ = ["context_parallel", "gather_sequence", "prefill", "ring_attention", "shard_sequence", "ulysses_attention"]
