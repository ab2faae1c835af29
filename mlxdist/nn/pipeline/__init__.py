"""Pipelines: models whose layers are spread over ranks, each a stage.

layers.py      what passes between the layers of a model, found by calling it
stage_plan.py  StagePlan, plan_stages: which stage has which layers
stage.py       pipeline_parallel, Stage: a model that has this rank's layers alone
elsewhere.py   modules and caches of layers that another stage holds
transfer.py    activations and gradients between stages
schedule.py    Schedule, pipeline_schedule: in which order the stages compute the micro-batches of a training step
timeline.py    when each rank did what, simulated or measured
batch_generator.py    PipelineBatchGenerator: generation with several batches on their way
"""

from .batch_generator import PipelineBatchGenerator
from .schedule import Schedule, pipeline_schedule
from .stage import Stage, pipeline_parallel
from .stage_plan import StagePlan, plan_stages
from .timeline import Action, Timeline

__all__ = [
    "Action",
    "PipelineBatchGenerator",
    "Schedule",
    "Stage",
    "StagePlan",
    "Timeline",
    "pipeline_parallel",
    "pipeline_schedule",
    "plan_stages",
]
