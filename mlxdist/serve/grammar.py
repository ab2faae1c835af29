"""Structured output: answers that a JSON schema or a regular expression describes, through llguidance.

Rank 0 compiles the grammar of a request before it admits the request; every rank then masks the logits of that request
alone. A mask depends on the grammar and the tokens only, so all ranks compute the same one.
"""

import json
import subprocess
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxdist.base.child_process import code_command
from mlxdist.base.json_reader import parse_json

from .refusal import Refusal

__all__ = ["GrammarProcessor", "after_thinking", "grammar_of", "grammar_tokenizer"]

_MAX_SIZE = 1 << 16  # bytes of a grammar as a client sends it
_SECONDS = 1  # of CPU time to compile it; a schema of 1,000 properties takes 0.1
_MAX_STATES = 20_000  # of a lexer, with 1 to 2 kB each; llguidance would take 250,000
# llama.cpp's pattern: it allows any style of indentation, but no model that writes spaces without end.
_WHITESPACE: Any = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
# An intersection of patterns can take any time, and no call ends llguidance's compiler: so it runs in a process with a
# limit of CPU time.
_COMPILE = f"""
import resource, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
grammar = sys.stdin.buffer.read().decode()
limits = LLParserLimits(max_lexer_states={_MAX_STATES}, verbose_errors=False)
matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
matcher.compute_bitmask()
sys.stdout.buffer.write(matcher.get_error().encode())
"""
_WAIT = 10.0  # seconds for others that are being compiled
_compiling = threading.Lock()  # one process at a time, whatever clients send


def grammar_of(body: Mapping[str, Any]) -> str:
    """llguidance's grammar for OpenAI's ``response_format`` or vLLM's ``structured_outputs``; empty if there is none.

    Raises:
        Refusal: the field is malformed; the grammar is too large, or llguidance cannot compile it, or not now.
    """
    schema, regex = _schema_of(body.get("response_format")), _regex_of(body.get("structured_outputs"))
    if schema is None and regex is None:
        return ""
    if schema is not None and regex is not None:
        raise Refusal("response_format and structured_outputs exclude each other")
    if body.get("tools"):
        raise Refusal("a request with tools cannot have response_format, which is for all its text")
    try:
        if regex is not None:
            grammar = LLMatcher.grammar_from_regex(regex)
        else:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), defaults=_WHITESPACE)
        size = len(grammar.encode())
    except ValueError:  # all else that Python's JSON has and llguidance's does not
        raise Refusal("the grammar has half a surrogate pair, or a number that is not finite") from None
    if size > _MAX_SIZE:
        raise Refusal(f"the grammar has {size} bytes, and at most {_MAX_SIZE} are served")
    if error := _compile(grammar):
        raise Refusal(f"the grammar cannot be compiled: {error}")
    return grammar


def after_thinking(grammar: str, tokenizer: TokenizerWrapper, state: str) -> str:
    """``grammar`` preceded by the thoughts that a model may write, which mlx-lm returns to clients as `reasoning`.

    Args:
        state: the state of mlx-lm's text at the end of the prompt: "reasoning" if the prompt has begun the thoughts.

    Raises:
        Refusal: answers of this model have sections that mlx-lm separates in another way.
    """
    if state not in ("normal", "reasoning") or tokenizer.structural_markers:
        raise Refusal("structured output is not served for chats with this model, whose answers have several parts")
    if not tokenizer.has_thinking:
        return grammar
    begin, end = (
        " ".join(f"<[{token}]>" for token in marker)
        for marker in (tokenizer.think_start_tokens, tokenizer.think_end_tokens)
    )
    thoughts = f"THOUGHTS {end}" if state == "reasoning" else f"({begin} THOUGHTS {end})?"
    (answer,) = parse_json(grammar)["grammars"]
    first = {"lark_grammar": f"start: {thoughts} @answer\nTHOUGHTS: /(?s:.*)/"}
    return json.dumps({"grammars": [first, answer | {"name": "answer"}]}, ensure_ascii=False)


@lru_cache(maxsize=1)
def grammar_tokenizer(tokenizer: TokenizerWrapper) -> LLTokenizer | None:
    """llguidance's form of a tokenizer, made once, in 1 s per 150,000 tokens. None: llguidance cannot read it."""
    try:
        return from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
    except ValueError:  # no fast tokenizer
        return None


class GrammarProcessor:
    """A logits processor of mlx-lm, which allows the tokens that keep an answer in its grammar.

    Once the answer is complete, and after an error of llguidance, it allows the tokens that end an answer.

    The result of a call depends on its arguments, and not on earlier calls: the processor stores the tokens that the
    matcher has read, and rolls back those that differ. So it also serves contexts that a draft model proposes.

    Args:
        prompt: the number of tokens of the prompt, which are no part of the answer.
    """

    def __init__(self, grammar: str, tokenizer: LLTokenizer, prompt: int) -> None:
        self._grammar, self._tokenizer, self._prompt = grammar, tokenizer, prompt
        self._error = ""
        self._begin()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        answer: Any = tokens[self._prompt :]
        mx.async_eval(answer)
        mx.async_eval(logits)  # the model computes them while the matcher looks for the tokens that may follow
        self._follow(answer.tolist())
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # A model may have more logits than its tokenizer has tokens: bits that are not there are 0.
        allowed = np.unpackbits(mask, count=logits.shape[-1], bitorder="little").astype(bool)
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def failure(self, tokens: list[int]) -> str:
        """The reason why an answer does not match the grammar; empty if it does.

        Args:
            tokens: the prompt, the answer, and the token that ended it.
        """
        is_one = self._follow(tokens[self._prompt : -1]) and self._matcher.is_accepting()
        return "" if is_one else self._error or "the answer ended too early"

    def _begin(self) -> None:
        limits = LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
        self._matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=limits)
        self._read: list[int] = []

    def _follow(self, answer: list[int]) -> bool:
        """Makes the matcher read ``answer``, as far as the grammar allows. Returns whether it has read all of it."""
        if self._matcher.is_error():  # for good: llguidance takes nothing back after an error
            self._error = _sentence(self._matcher.get_error())
            self._begin()
        pairs = enumerate(zip(self._read, answer))
        same = next((i for i, (old, new) in pairs if old != new), min(len(self._read), len(answer)))
        self._matcher.rollback(len(self._read) - same)
        self._read = answer[: same + self._matcher.try_consume_tokens(answer[same:])]
        return len(self._read) == len(answer)


def _schema_of(given: Any) -> Any:
    """The JSON schema in ``response_format``, or None."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise Refusal("response_format must have the type text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise Refusal("response_format must have json_schema, an object, with schema, an object")
    return inner["schema"]


def _regex_of(given: Any) -> str | None:
    """The regular expression in ``structured_outputs``, or None."""
    if given is None:
        return None
    if not isinstance(given, dict) or list(given) != ["regex"] or not isinstance(given["regex"], str):
        raise Refusal('structured_outputs must be {"regex": "..."}; JSON schemas go into response_format')
    return given["regex"]


@lru_cache(maxsize=64)
def _compile(grammar: str) -> str:
    """The error in a grammar; empty if it compiles. Raises Refusal, which is not cached: the machine is too busy."""
    busy = Refusal("this machine is too busy to compile the grammar", 503, retry_after=1)
    if not _compiling.acquire(timeout=_WAIT):
        raise busy
    try:
        done = subprocess.run(code_command(_COMPILE), input=grammar.encode(), capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise busy from None
    finally:
        _compiling.release()
    return _sentence(done.stdout.decode()) if done.returncode == 0 else "it takes too much time or memory"


def _sentence(error: str) -> str:
    """An error of llguidance as one line of at most 500 characters; llguidance marks the place in lines below."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:500]
