"""mlx-lm's prompt cache with a limit that all ranks reach at the same time."""

from collections.abc import Iterator
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

__all__ = ["PrefixCache"]


class PrefixCache(LRUPromptCache):
    """Keeps KV caches of prompts and responses, at most ``max_size`` of them with ``max_tokens`` tokens in all.

    mlx-lm's limit in bytes counts this rank's shard, whose size differs between ranks with unequal shares of the
    heads: ranks would evict at different times. The order of eviction is mlx-lm's: responses before prompts of users
    before system prompts, the oldest first.

    Attributes:
        room: the number of tokens that there is memory for now.
        tokens: the tokens of all stored sequences; a prefix that two share counts twice. Any thread
            may read it, as /metrics does while the thread of the model inserts.
    """

    def __init__(self, max_size: int, max_tokens: int) -> None:
        super().__init__(max_size)
        self.max_tokens = max_tokens
        self.room = max_tokens
        self.tokens = 0

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **keywords: Any) -> None:
        super().insert_cache(model, tokens, prompt_cache, **keywords)
        self.make_room(self.room)

    def make_room(self, tokens: int) -> None:
        """Limits the stored tokens to that many from now on, and to ``max_tokens``, and evicts what exceeds that."""
        self.room = tokens
        while len(self) and self._count() > min(tokens, self.max_tokens):
            self.trim_to(n_sequences=len(self) - 1)
        self.tokens = self._count()

    def sequences(self, model: Any) -> Iterator[tuple[str, list[int], list[Any]]]:
        """Yields kind, tokens and KV caches of each sequence of a model; within each kind the oldest first."""
        for kind, lru in self._lru._lrus.items():
            for key, tokens in lru:
                if key == model:
                    yield kind, tokens, self._trie.get(key, tokens).prompt_cache

    def _count(self) -> int:
        return sum(len(tokens) for lru in self._lru._lrus.values() for _, tokens in lru)
