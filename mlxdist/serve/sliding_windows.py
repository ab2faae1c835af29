"""A mend of mlx-lm's batches of sliding windows, which mlx-lm 0.32.2 needs."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import BatchRotatingKVCache

from .row_caches import flat

__all__ = ["put_in_order"]


def put_in_order(caches: Sequence[Any]) -> None:
    """Puts the sliding windows of a batch in the order of time, before a call with several tokens of each row.

    After a call with one token a window may begin anywhere in its array. mlx-lm orders it once the mask has been made,
    which counts from where it begins: it hides the first token of a row that does not fill the window.
    """
    for cache in flat(caches):
        if isinstance(cache, BatchRotatingKVCache):
            cache._temporal_order()
