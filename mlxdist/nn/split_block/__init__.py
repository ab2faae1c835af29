"""Split command buffers: decoder layers as two compiled segments, joined by all_sum.

split_block.py   SplitBlock, one layer; SplitModel, a full model of them, is in models/
shard_layer.py   this rank's shard of a layer of mlx-lm; merged.py: its matrices, merged and transposed once
decode_time.py   the time of a decode step by a block and by the layer
head.py          the head, sharded by vocabulary
rotary.py        rotary embeddings at an offset that is an array
probes.py        a few tokens at positions that a configuration names
submissions.py   Submissions, submissions: when and how often a graph is submitted to MLX
"""

from .split_block import SplitBlock
from .submissions import Submissions, submissions

__all__ = ["SplitBlock", "Submissions", "submissions"]
