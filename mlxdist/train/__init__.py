"""Training over several ranks."""

from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .data_parallel import all_reduce_grads

__all__ = ["all_reduce_grads", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]
