"""Expert parallelism: the experts of a mixture on different ranks."""

from .dispatch import Handle, combine, dispatch
from .placement import Placement

__all__ = ["Handle", "Placement", "combine", "dispatch"]
