"""mlx-lm's prompt cache with a limit that all ranks reach at the same time."""

from typing import Any

from mlx_lm.models.cache import LRUPromptCache

__all__ = ["PrefixCache"]


class PrefixCache(LRUPromptCache):
    """Keeps KV caches of prompts and responses, at most ``max_size`` of them with ``max_tokens`` tokens in all.

    mlx-lm's limit in bytes counts those of this rank's shard, which differ between ranks with unequal shares of the
    heads: ranks would evict at different times. The order of eviction is mlx-lm's: responses before prompts of users
    before system prompts, the oldest first.
    """

    def __init__(self, max_size: int, max_tokens: int) -> None:
        super().__init__(max_size)
        self.max_tokens = max_tokens

    @property
    def tokens(self) -> int:
        """In all sequences that are kept; a prefix that two share counts twice, as it is kept twice."""
        return sum(len(tokens) for lru in self._lru._lrus.values() for _, tokens in lru)

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **keywords: Any) -> None:
        super().insert_cache(model, tokens, prompt_cache, **keywords)
        while len(self) and self.tokens > self.max_tokens:
            self.trim_to(n_sequences=len(self) - 1)
