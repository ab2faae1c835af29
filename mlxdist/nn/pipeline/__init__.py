"""Pipelines: models whose layers are spread over ranks, each a stage.

layers.py      what passes between the layers of a model, found by calling it
stage_plan.py  StagePlan, plan_stages: which stage has which layers
stage.py       pipeline_parallel, Stage: a model that has this rank's layers alone
elsewhere.py   modules and caches of layers that another stage holds
transfer.py    activations and gradients between stages
"""

from .stage import Stage, pipeline_parallel
from .stage_plan import StagePlan, plan_stages

__all__ = ["Stage", "StagePlan", "pipeline_parallel", "plan_stages"]
