"""Split command buffers: decoder layers as two compiled segments, joined by all_sum.

split_block.py   SplitBlock, one layer; split_model.py: SplitModel, a full model of them
shard_layer.py   this rank's shard of a layer of mlx-lm; merged.py: its matrices, merged and transposed once
head.py          the head, sharded by vocabulary
rotary.py        rotary embeddings at an offset that is an array
probes.py        a few tokens at positions that a configuration names
submissions.py   when and how often a graph is submitted to MLX
"""

from .split_block import SplitBlock
from .split_model import SplitModel
from .submissions import Submissions, submissions

__all__ = ["SplitBlock", "SplitModel", "Submissions", "submissions"]
