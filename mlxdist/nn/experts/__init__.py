"""Expert parallelism: the experts of a mixture on different ranks."""

from .dispatch import Handle, combine, dispatch
from .placement import Placement
from .switch import ExpertParallelSwitchGLU

__all__ = ["ExpertParallelSwitchGLU", "Handle", "Placement", "combine", "dispatch"]
