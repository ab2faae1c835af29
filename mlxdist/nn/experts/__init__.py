"""Expert parallelism: the experts of a mixture on different ranks."""

from .balance import BalanceBias, ExpertLoad, count_experts
from .checkpoint import checkpoint
from .dispatch import Handle, combine, dispatch
from .low_latency import LowLatencyExchange
from .overlap import Overlap, OverlappedExchange
from .placement import Placement
from .policy import Link, Policy, Workload, calibrate
from .switch import ExpertParallelSwitchGLU

__all__ = [
    "BalanceBias",
    "ExpertLoad",
    "ExpertParallelSwitchGLU",
    "Handle",
    "Link",
    "LowLatencyExchange",
    "Overlap",
    "OverlappedExchange",
    "Placement",
    "Policy",
    "Workload",
    "calibrate",
    "checkpoint",
    "combine",
    "count_experts",
    "dispatch",
]
