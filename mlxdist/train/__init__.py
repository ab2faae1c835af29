"""Training over several ranks.

trainer.py                train, TrainResult: `mlxdist train`; training_loop.py: its loop; config.py: TrainConfig
model.py                  the loop's model and optimizer; preflight.py, report.py, fingerprint.py
value_and_grad.py         value_and_grad: gradients of a step, averaged over the ranks
step_gradients.py         GradientSums, and their average; of full_model_gradients.py and pipeline_gradients.py;
                          step_loss.py: what both do with fn; stage_messages.py: what stages send each other
gradient_accumulation.py  a step of several micro-batches
data_parallel.py          average_gradients, all_reduce_grads
fully_shard/              fully_shard: ZeRO 1, 2 and 3
mixed_precision.py        MixedPrecision: training in 16 bits; loss_scaling.py: the scale of the loss; rounding.py
clip_grad_norm.py         clip_grad_norm
stage_terms.py            stage_loss: terms of a loss that a stage adds; lost_terms.py: those that would be lost
batches.py                Batches: which rows a rank takes; datasets.py: load_dataset
seeds.py                  Seeds: random numbers by step
schedules.py              BatchRampUp, warm_up, linear_scaling, sqrt_scaling
checkpoint/               Checkpoints: saved by all ranks, loaded by any number of them
elastic.py                elastic, InMemoryCheckpoint: go on without lost ranks
control.py                Control, Decision: stop, save and skip on all ranks alike
gradient_guard.py         GradientGuard; loss_alarm.py: LossAlarm
throughput.py             Throughput; flops.py: FlopsPerToken, flops_per_token
"""

from .batches import Batches
from .checkpoint import Checkpoints
from .clip_grad_norm import clip_grad_norm
from .config import TrainConfig
from .control import Control, Decision
from .data_parallel import all_reduce_grads, average_gradients
from .datasets import load_dataset
from .elastic import InMemoryCheckpoint, elastic
from .flops import FlopsPerToken, flops_per_token
from .fully_shard.fully_shard import fully_shard
from .gradient_guard import GradientGuard
from .loss_alarm import LossAlarm
from .mixed_precision import MixedPrecision
from .schedules import BatchRampUp, linear_scaling, sqrt_scaling, warm_up
from .seeds import Seeds
from .stage_terms import stage_loss
from .throughput import Throughput
from .trainer import TrainResult, train
from .value_and_grad import value_and_grad

__all__ = [
    "BatchRampUp",
    "Batches",
    "Checkpoints",
    "Control",
    "Decision",
    "FlopsPerToken",
    "GradientGuard",
    "InMemoryCheckpoint",
    "LossAlarm",
    "MixedPrecision",
    "Seeds",
    "Throughput",
    "TrainConfig",
    "TrainResult",
    "all_reduce_grads",
    "average_gradients",
    "clip_grad_norm",
    "elastic",
    "flops_per_token",
    "fully_shard",
    "linear_scaling",
    "load_dataset",
    "sqrt_scaling",
    "stage_loss",
    "train",
    "value_and_grad",
    "warm_up",
]
