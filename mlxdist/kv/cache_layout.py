"""The facts about a rank's model that every transfer of a cache needs."""

from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from .agreement import attempt
from .holdings import Held, holdings
from .same_model import described_model

__all__ = ["CacheLayout", "layout_of"]


class CacheLayout:
    """The part of a model, and of its prompt caches, that this rank has.

    Args:
        model: full, of ``shard_model``, ``pipeline_parallel`` or both.

    Attributes:
        described: the model for JSON, as :func:`described_model` returns it.
        layers: the number of caches in a prompt cache.

    Raises:
        InvalidArgument: ``model`` is no model.
    """

    def __init__(self, model: Any) -> None:
        self.described = described_model(model)
        self.layers = len(make_prompt_cache(model))
        self._model = model
        self._found: tuple[list[list[Held]] | None, Exception | None] | None = None

    def find(self) -> "CacheLayout":
        """Calls :func:`holdings` now, and no more later. Returns this object."""
        self._found, self._model = attempt(lambda: holdings(self._model)), None
        return self

    @property
    def held(self) -> list[list[Held]]:
        """This rank's part of each layer's cache. Raises as :func:`holdings`."""
        held, refusal = self._found or attempt(lambda: holdings(self._model))
        if held is None:
            assert refusal is not None
            raise refusal
        return held


def layout_of(model: Any) -> CacheLayout:
    """Finds the facts about ``model`` that transfers need, once for many of them, which then do not call the model.

    So another thread may use the model during a transfer, and its layers may have been replaced by others with the same
    caches, as by ``SplitModel.from_model``.

    Args:
        model: full, of ``shard_model``, ``pipeline_parallel`` or both.

    Returns:
        The value for the argument ``model`` of ``send`` and ``recv``.

    Raises:
        InvalidArgument: ``model`` is no model.
    """
    return CacheLayout(model).find()
