"""Training over several ranks."""

from .data_parallel import all_reduce_grads

__all__ = ["all_reduce_grads"]
