"""Training over several ranks."""

from .batches import Batches
from .checkpoint import Checkpoints
from .clipping import clip_grad_norm
from .control import Control, Decision
from .data_parallel import all_reduce_grads, average_gradients
from .datasets import load_dataset
from .flops import FlopsPerToken, flops_per_token
from .fully_sharded import fully_shard
from .gradient_guard import GradientGuard
from .loss_alarm import LossAlarm
from .mixed_precision import MixedPrecision
from .schedules import BatchRampUp, linear_scaling, sqrt_scaling, warm_up
from .seeds import Seeds
from .stage_terms import stage_loss
from .throughput import Throughput
from .training_step import value_and_grad

__all__ = [
    "BatchRampUp",
    "Batches",
    "Checkpoints",
    "Control",
    "Decision",
    "FlopsPerToken",
    "GradientGuard",
    "LossAlarm",
    "MixedPrecision",
    "Seeds",
    "Throughput",
    "all_reduce_grads",
    "average_gradients",
    "clip_grad_norm",
    "flops_per_token",
    "fully_shard",
    "linear_scaling",
    "load_dataset",
    "sqrt_scaling",
    "stage_loss",
    "value_and_grad",
    "warm_up",
]
