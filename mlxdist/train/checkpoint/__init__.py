"""Checkpoints: what a training needs to go on where it stopped, on any number of ranks."""

from .checkpoints import Checkpoints

__all__ = ["Checkpoints"]
