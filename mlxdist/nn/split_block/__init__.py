"""Split command buffers: decoder layers as two compiled segments, joined by all_sum.

split_block.py   SplitBlock, one layer; split_model.py: SplitModel, a whole model of them
head.py          the head, cut by vocabulary; submitted.py: the sums of layers that shard_model has cut
in_place_of.py   what stands for another module has its attributes
probes.py        a few tokens at positions that a configuration names
cut_layer.py     this rank's part of a layer of mlx-lm; merged.py: its matrices, merged and transposed once
rotary.py        rotary embeddings at an offset that is an array
submissions.py   how often a graph was handed to MLX
"""

from .split_block import SplitBlock
from .split_model import SplitModel
from .submissions import Submissions, submissions

__all__ = ["SplitBlock", "SplitModel", "Submissions", "submissions"]
