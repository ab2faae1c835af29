"""Structured output: answers that a grammar describes, through llguidance.

A process beside rank 0 compiles the grammar of a request; every rank then masks the logits of that request alone. A
mask depends on the grammar and the tokens only, so all ranks compute the same one.
"""

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxdist.base.child_process import code_command
from mlxdist.base.json_reader import parse_json

from .prepared import CallFormat
from .protocol import Grammar
from .refusal import Refusal

__all__ = ["GrammarProcessor", "after_thinking", "calls_grammar", "grammar_of", "grammar_tokenizer", "or_calls"]

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
_WAIT = 30.0  # seconds


def grammar_of(wanted: Grammar) -> str:
    """llguidance's grammar for the text of an answer.

    Raises:
        Refusal: the grammar is malformed or too large, or llguidance cannot compile it, or not now.
    """
    return _checked(lambda: _grammars_of(wanted))


def calls_grammar(tools: Sequence[Mapping[str, Any]], how: CallFormat, name: str, parallel: bool) -> str:
    """llguidance's grammar for the content of an answer that must call a tool.

    Each schema of parameters is a grammar of its own, because `$ref` begins at the root of a schema.

    Args:
        how: "arguments": of the function ``name``; "list": of any of the tools, see :class:`Prepared`.
        parallel: whether the list may have more than one call.

    Raises:
        Refusal: as :func:`grammar_of`.
    """
    schemas = {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}
    if how == "arguments":
        return _checked(lambda: _schema_grammar(schemas[name]))

    def grammars() -> list[dict[str, Any]]:
        begins = [json.dumps(f'{{"name": {json.dumps(each)}, "parameters": ') for each in schemas]
        calls = " | ".join(f'{begin} @tool{place} "}}"' for place, begin in enumerate(begins))
        more = '(", " call)*' if parallel else ""
        inner = [_schema_grammar(schema)[0] | {"name": f"tool{place}"} for place, schema in enumerate(schemas.values())]
        return [{"lark_grammar": f'start: "[" call {more} "]"\ncall: {calls}'}, *inner]

    return _checked(grammars)


def or_calls(grammar: str, tokenizer: TokenizerWrapper, parallel: bool) -> str:
    """``grammar``, or calls of tools in the model's own format, in place of it.

    Raises:
        Refusal: the model's calls begin or end with ordinary text, which the text of a call may have, too.
    """
    begin, end = tokenizer.tool_call_start_tokens, tokenizer.tool_call_end_tokens
    markers = set(tokenizer.get_added_vocab().values())
    if not begin or not markers.issuperset((*begin, *end)):
        raise Refusal(
            "response_format with tools is not served with this model; leave one out, or set tool_choice to none or "
            "required",
            param="response_format",
        )
    call = f"{_tokens(begin)} CALL {_tokens(end)}"
    calls = f"{call} (SPACE? {call})*" if parallel else call
    return _before("content", grammar, f"start: {calls} | @content\nCALL: /(?s:.*)/\nSPACE: /\\s+/")


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
    begin, end = _tokens(tokenizer.think_start_tokens), _tokens(tokenizer.think_end_tokens)
    thoughts = f"THOUGHTS {end}" if state == "reasoning" else f"({begin} THOUGHTS {end})?"
    return _before("answer", grammar, f"start: {thoughts} @answer\nTHOUGHTS: /(?s:.*)/")


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


def _grammars_of(wanted: Grammar) -> list[dict[str, Any]]:
    value = wanted.value
    if wanted.kind == "json":
        if not isinstance(value, dict | bool):
            raise Refusal("the JSON schema of the answer must be an object")
        return _schema_grammar(value)
    if wanted.kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
            raise Refusal("the choices of the answer must be a list of strings, and not empty")
        return parse_json(LLMatcher.grammar_from_regex("|".join(map(re.escape, value))))["grammars"]
    if not isinstance(value, str):
        raise Refusal(f"the {wanted.kind} of the answer must be a string")
    if wanted.kind == "regex":
        return parse_json(LLMatcher.grammar_from_regex(value))["grammars"]
    return [{"lark_grammar": value}]


def _schema_grammar(schema: Any) -> list[dict[str, Any]]:
    text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    return parse_json(LLMatcher.grammar_from_json_schema(text, defaults=_WHITESPACE))["grammars"]


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. OpenAI: without parameters it has none."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise Refusal(f"the parameters of the function {function['name']!r:.80} must be a JSON schema", param="tools")
    return {"type": "object"} | parameters


def _before(name: str, grammar: str, lark: str) -> str:
    """A grammar in Lark that refers to ``grammar`` by a name with @."""
    first, *others = parse_json(grammar)["grammars"]
    grammars = [{"lark_grammar": lark}, first | {"name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(f"<[{token}]>" for token in tokens)


def _checked(grammars: Callable[[], list[dict[str, Any]]]) -> str:
    """The text of grammars that compile, and are not too large."""
    try:
        grammar = json.dumps({"grammars": grammars()}, ensure_ascii=False)
        size = len(grammar.encode())
    except ValueError:  # all else that Python's JSON has and llguidance's does not
        raise Refusal("the grammar has half a surrogate pair, or a number that is not finite") from None
    if size > _MAX_SIZE:
        raise Refusal(f"the grammar has {size} bytes, and at most {_MAX_SIZE} are served")
    if error := _compile(grammar):
        raise Refusal(f"the grammar cannot be compiled: {error}")
    return grammar


@lru_cache(maxsize=64)
def _compile(grammar: str) -> str:
    """The error in a grammar; empty if it compiles. Raises Refusal, which is not cached: the machine is too busy."""
    try:
        done = subprocess.run(code_command(_COMPILE), input=grammar.encode(), capture_output=True, timeout=_WAIT)
    except subprocess.TimeoutExpired:
        raise Refusal("this machine is too busy to compile the grammar", 503, retry_after=1) from None
    return _sentence(done.stdout.decode()) if done.returncode == 0 else "it takes too much time or memory"


def _sentence(error: str) -> str:
    """An error of llguidance as one line of at most 500 characters; llguidance marks the place in lines below."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:500]
