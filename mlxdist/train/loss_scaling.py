"""The scale of the loss, with which gradients of float16 do not underflow.

Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740, section 3.2.
"""

from typing import Any, Literal

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument

__all__ = ["LossScale", "check_loss_scale", "first_state", "next_state"]

LossScale = float | Literal["dynamic"] | None
_FIRST, _LARGEST = 2.0**16, 2.0**24
_STEPS_TO_GROW = 2000  # without an overflow, as in arXiv:1710.03740


def check_loss_scale(name: str, loss_scale: Any) -> None:
    """Raises InvalidArgument: ``loss_scale`` is no :data:`LossScale`."""
    is_scale = (
        isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool) and 0 < loss_scale < float("inf")
    )
    if loss_scale not in (None, "dynamic") and not is_scale:
        raise InvalidArgument(f"{name}: loss_scale must be None, 'dynamic' or positive, not {loss_scale!r}")


def first_state(loss_scale: float | Literal["dynamic"]) -> dict[str, mx.array]:
    """The first state: the scale, the steps since the scale changed, and the number of skipped steps."""
    scale = _FIRST if loss_scale == "dynamic" else float(loss_scale)
    return {"loss_scale": mx.array(scale), "good_steps": mx.array(0), "skipped": mx.array(0)}


def next_state(state: dict[str, Any], finite: mx.array, is_dynamic: bool) -> dict[str, mx.array]:
    """:func:`first_state` after a step: a dynamic scale is halved where a gradient was not ``finite``, and doubled
    after 2000 steps without such a one."""
    scale, good = state["loss_scale"], mx.where(finite, state["good_steps"] + 1, 0)
    if is_dynamic:
        grown = mx.where(good >= _STEPS_TO_GROW, scale * 2, scale)
        scale = mx.clip(mx.where(finite, grown, scale / 2), 1.0, _LARGEST)
    return {
        "loss_scale": scale,
        "good_steps": mx.where(good >= _STEPS_TO_GROW, 0, good),
        "skipped": state["skipped"] + mx.where(finite, 0, 1),
    }
