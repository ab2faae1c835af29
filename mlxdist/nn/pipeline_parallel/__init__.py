"""Pipeline parallelism: models whose layers are spread over ranks, each a stage.

pipeline_parallel.py  pipeline_parallel: makes a model a stage
stage.py              Stage; stage_calls.py: what it computes, receives and sends; stage_parameters.py: who holds which
layers.py             what passes between the layers of a model, found by calling it
stage_plan.py         StagePlan, plan_stages: which stage has which layers
missing_layers.py     modules and caches of layers that another stage holds
transfer.py           activations and gradients between stages
schedule.py           Schedule, pipeline_schedule: GPipe, 1F1B, interleaved 1F1B and zero bubble, as data
one_f_one_b.py        the order of a rank's actions in them
timeline.py           Timeline, Action: when each rank did what, simulated or measured

PipelineBatchGenerator, which keeps several batches on their way, is in models/.
"""

from .pipeline_parallel import pipeline_parallel
from .schedule import Schedule, pipeline_schedule
from .stage import Stage
from .stage_plan import StagePlan, plan_stages
from .timeline import Action, Timeline

__all__ = [
    "Action",
    "Schedule",
    "Stage",
    "StagePlan",
    "Timeline",
    "pipeline_parallel",
    "pipeline_schedule",
    "plan_stages",
]
