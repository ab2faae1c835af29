"""Expert parallelism: the experts of a mixture on different ranks.

switch_glu.py        ExpertParallelSwitchGLU: mlx-lm's layer with each expert on one rank
local_experts.py     this rank's experts; placement.py: Placement, which rank holds which
replicated.py        tokens that all ranks have; gathered.py: that each rank gathers
dispatch.py          dispatch, combine, DispatchHandle: tokens sent to the ranks of their experts
low_latency.py       LowLatencyExchange: the same for few tokens, without a plan
overlap.py           Overlap, OverlappedExchange: while other experts compute
policy.py            Policy, LinkCosts, Workload, calibrate: which of the ways is the fastest
links.py             RankLinks: which costs are those of some of the ranks
load_balancing.py    BalanceBias, ExpertLoad, count_experts: experts that are chosen about equally often
capacity.py          tokens beyond an expert's capacity; fp8.py: tokens sent in 8 bits
pairs.py             pairs of a token and an expert; comparisons.py: which calls the ranks compare
activation_checkpointing.py  checkpoint: mx.checkpoint for layers of experts
"""

from .activation_checkpointing import checkpoint
from .dispatch import DispatchHandle, combine, dispatch
from .load_balancing import BalanceBias, ExpertLoad, count_experts
from .low_latency import LowLatencyExchange
from .overlap import Overlap, OverlappedExchange
from .placement import Placement
from .policy import LinkCosts, Policy, Workload, calibrate
from .switch_glu import ExpertParallelSwitchGLU

__all__ = [
    "BalanceBias",
    "DispatchHandle",
    "ExpertLoad",
    "ExpertParallelSwitchGLU",
    "LinkCosts",
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
