"""Training over several ranks."""

from .checkpoint import Checkpoints
from .clip_grad_norm import clip_grad_norm
from .control import Control, Decision
from .data_parallel import average_gradients
from .fully_shard import fully_shard
from .gradient_guard import GradientGuard
from .loss_alarm import LossAlarm
from .mixed_precision import MixedPrecision

__all__ = [
    "Checkpoints",
    "Control",
    "Decision",
    "GradientGuard",
    "LossAlarm",
    "MixedPrecision",
    "average_gradients",
    "clip_grad_norm",
    "fully_shard",
]
