"""/v1/models."""

from collections.abc import Sequence
from typing import Any

from ..refusal import Refusal

__all__ = ["model_object", "models_list"]


def models_list(models: Sequence[str], adapters: Sequence[str], created: int) -> dict[str, Any]:
    """The answer to /v1/models: the model, by its first name, and its adapters. ``created``: seconds since 1970."""
    names = [models[0], *adapters]
    return {"object": "list", "data": [model_object(name, models, adapters, created) for name in names]}


def model_object(name: str, models: Sequence[str], adapters: Sequence[str], created: int) -> dict[str, Any]:
    """The answer to /v1/models/``name``, any name of the model or of an adapter. Raises Refusal: there is none."""
    found = {"id": models[0], "object": "model", "created": created, "owned_by": "you"}
    if name in models:
        return found
    if name in adapters:
        return found | {"id": name, "parent": models[0]}
    raise Refusal(f"there is no model {name[:64]!r}; /v1/models has all", 404, code="model_not_found")
