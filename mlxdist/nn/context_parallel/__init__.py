"""Context parallelism: attention over sequences that are sharded over the ranks.

context_parallel.py  context_parallel: a model of mlx-lm whose attention spans all ranks
ring_attention.py    ring_attention; tiles.py: the blocks that it is computed in
ulysses.py           ulysses_attention
sequence.py          shard_sequence, gather_sequence: which tokens a rank has
prefill.py           prefill: the caches of a long prompt, computed by all ranks
arguments.py         what both kinds of attention check
"""

from .context_parallel import context_parallel
from .prefill import prefill
from .ring_attention import ring_attention
from .sequence import gather_sequence, shard_sequence
from .ulysses import ulysses_attention

__all__ = ["context_parallel", "gather_sequence", "prefill", "ring_attention", "shard_sequence", "ulysses_attention"]
