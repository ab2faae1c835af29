"""Limits of a request. A request beyond them would stop every rank, or take resources that other requests need."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlxdist.base.json_reader import NestedTooDeeply, parse_json

from .decisions import MAX_BIASES
from .refusal import Refusal

__all__ = ["check_fields", "check_parameters", "parse_body", "sentence"]

_MAX_DEPTH = 32  # of lists and objects in each other
_MAX_MESSAGES = 4096
_MAX_TOOLS = 256
_MAX_PRIORITY = 100  # as vLLM has them: the least is served first
_MAX_STOPS = 16
_MAX_STOP = 256  # characters of a stop word

# Parameters of mlx-lm's handler, with their ranges. Outside of these, samplers give NaN or raise in the batch.
_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_context_size": (0, 1 << 20),
    "presence_context_size": (0, 1 << 20),
    "frequency_context_size": (0, 1 << 20),
    "max_tokens": (1, 1 << 31),
}
_LEAST = {"temperature": 1e-4, "repetition_penalty": 0.01}  # unless it is 0
# Fields that change the answer in OpenAI's or mlx-lm's API, and the values with which they do not.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "draft_model": (None, "default_model"),
    "echo": (None, False),
    "n": (None, 1),
    "suffix": (None, ""),
}
# Arguments of transformers' apply_chat_template, which are not variables of the template.
_OF_TOKENIZER = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        Refusal: the body is not UTF-8 or no JSON object, or is nested too deep.
    """
    try:
        parsed = parse_json(body.decode(), repeated=True)
    except UnicodeDecodeError as error:
        raise Refusal(f"byte {error.start} of the body is not of UTF-8") from None
    except NestedTooDeeply:
        raise Refusal(f"the body has more than {_MAX_DEPTH} lists and objects in each other") from None
    except ValueError as error:
        raise Refusal(f"Invalid JSON in request body: {error}") from None
    if not isinstance(parsed, dict):
        raise Refusal("the body is not a JSON object")
    level: list[Any] = [parsed]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
        if not level:
            return parsed
    raise Refusal(f"the body has more than {_MAX_DEPTH} lists and objects in each other")


def check_parameters(parameters: Mapping[str, Any], vocabulary: int) -> None:
    """Checks the parameters that mlx-lm's handler has read, whose types it has checked.

    Raises:
        Refusal: a number is out of its range; a token is not in the ``vocabulary``.
    """
    for name, (low, high) in _RANGES.items():
        value = parameters[name]
        if not low <= value <= high:  # NaN is not, either
            raise Refusal(f"{name} must be from {low} to {high}")
        if 0 < value < _LEAST.get(name, 0):
            raise Refusal(f"{name} must be 0 or at least {_LEAST[name]}")
    if not parameters["top_k"] < vocabulary:
        raise Refusal(f"top_k must be less than {vocabulary}, the size of the vocabulary")
    if not parameters["top_logprobs"] < vocabulary:
        raise Refusal(f"top_logprobs must be less than {vocabulary}, the size of the vocabulary")
    if parameters["seed"] is not None and not 0 <= parameters["seed"] < 1 << 64:
        raise Refusal("seed must be from 0 to 2**64 - 1")
    bias = parameters["logit_bias"] or {}
    if len(bias) > MAX_BIASES:
        raise Refusal(f"logit_bias must have at most {MAX_BIASES} entries")
    for token, value in bias.items():
        if not (0 <= token < vocabulary and -100 <= value <= 100):
            raise Refusal(f"logit_bias must have tokens from 0 to {vocabulary - 1}, with numbers from -100 to 100")


def check_fields(body: Mapping[str, Any], is_chat: bool, served: tuple[str, ...], adapters: tuple[str, ...]) -> None:
    """Checks the fields of a body that mlx-lm does not check.

    Raises:
        Refusal: a field has another type than in OpenAI's API, is too long, or requests a feature that is not served;
            the model is none of ``served`` and no adapter; the adapter is none of ``adapters``.
    """
    model, adapter = body.get("model", served[0]), body.get("adapters")
    listed = f"the adapters {', '.join(adapters)}" if adapters else "no adapter"
    if model not in served and model not in adapters:
        raise Refusal(f"the model served here is {served[0]}, with {listed}; leave `model` out, or name those", 404)
    if adapter is not None and adapter not in adapters:
        raise Refusal(f"the model is served with {listed}; leave `adapters` out, or name one", 404)
    if model in adapters and adapter not in (None, model):
        raise Refusal("`model` and `adapters` name different adapters")
    for name, allowed in _NOT_SERVED.items():
        if body.get(name) not in allowed:
            raise Refusal(f"{name} is not served here")
    stop = body.get("stop") or []
    words = [stop] if isinstance(stop, str) else stop
    if not (_is_list(words, str, _MAX_STOPS) and all(0 < len(word) <= _MAX_STOP for word in words)):
        raise Refusal(f"stop must be a string or up to {_MAX_STOPS} of them, of 1 to {_MAX_STOP} characters")
    if any("\ud800" <= character <= "\udfff" for word in words for character in word):
        raise Refusal("stop has half of a surrogate pair, which no text has")
    priority = body.get("priority") or 0
    if type(priority) is not int or abs(priority) > _MAX_PRIORITY:
        raise Refusal(f"priority must be an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
    if not is_chat and not isinstance(body.get("prompt"), str):
        raise Refusal("prompt must be a string")
    messages: Any = body.get("messages") if is_chat else []
    if is_chat and not (messages and _is_list(messages, dict, _MAX_MESSAGES)):
        raise Refusal(f"messages must be a list of 1 to {_MAX_MESSAGES} objects")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise Refusal("a message must have a role, a string")
        parts = message.get("content")
        if not (parts is None or isinstance(parts, str)) and not (
            isinstance(parts, list) and all(_is_text(part) for part in parts)
        ):
            raise Refusal('the content of a message must be a string, or a list of {"type": "text", "text": "..."}')
    if not _is_list(body.get("tools") or [], dict, _MAX_TOOLS):
        raise Refusal(f"tools must be a list of at most {_MAX_TOOLS} objects")
    for name in ("role_mapping", "chat_template_kwargs", "stream_options"):
        if not isinstance(body.get(name), dict | None):
            raise Refusal(f"{name} must be an object")
    if wrong := _OF_TOKENIZER & set(body.get("chat_template_kwargs") or {}):
        raise Refusal(f"chat_template_kwargs must not have {', '.join(sorted(wrong))}")


def sentence(error: Exception) -> str:
    """The text of another library's exception, without paths and lines of this machine."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return re.sub(r"(/[\w.-]+){2,}", "...", text)[:500]


def _is_list(value: Any, kind: type, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(isinstance(item, kind) for item in value)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
