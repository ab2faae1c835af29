"""The bytes of single tokens, for log-probabilities: a token may be a part of a character."""

from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, _byte_decoder

from .answer import Token
from .protocol import TokenLogprob

__all__ = ["TokenBytes"]

_SPACE = "\u2581".encode()  # of SentencePiece


class TokenBytes:
    """The bytes of each token of a tokenizer.

    Args:
        tokenizer: mlx-lm's wrapper of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._detokenizer = tokenizer, tokenizer.detokenizer
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def logprob(self, token: Token) -> TokenLogprob:
        """A token of an answer with its log-probability, and with the likely tokens in its place."""
        top = [self._one(*each) for each in token.top]
        return self._one(token.token, token.logprob).model_copy(update={"top": top})

    def _one(self, token: int, logprob: float | None) -> TokenLogprob:
        data = self.of(token)
        return TokenLogprob(id=token, text=data.decode(errors="replace"), bytes=list(data), logprob=logprob)

    def _of(self, token: int) -> bytes:
        if isinstance(self._detokenizer, BPEStreamingDetokenizer):
            name = self._tokenizer.convert_ids_to_tokens(token) or ""
            known = _byte_decoder()
            return b"".join(bytes([known[each]]) if each in known else each.encode() for each in name)
        if isinstance(self._detokenizer, SPMStreamingDetokenizer):
            tokens = self._detokenizer.tokenmap
            return tokens[token].replace(_SPACE, b" ") if token < len(tokens) else b""
        return self._tokenizer.decode([token]).encode()
