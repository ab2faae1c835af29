"""Training over several ranks."""

from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .clip_grad_norm import clip_grad_norm
from .data_parallel import all_reduce_grads
from .fully_shard import fully_shard
from .mixed_precision import MixedPrecision

__all__ = [
    "MixedPrecision",
    "all_reduce_grads",
    "clip_grad_norm",
    "fully_shard",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
