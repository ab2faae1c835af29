"""What `mlxdist.serve` uses of mlx-lm to make requests into tokens. A new version of mlx-lm may change it."""

import importlib
import inspect
import pkgutil
import tomllib
from importlib.metadata import version
from pathlib import Path

import mlx_lm.tool_parsers
import pytest
from mlx_lm.server import convert_chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer
from transformers import PreTrainedTokenizerBase

from mlxdist.tools.bench.byte_model import byte_tokenizer

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="module")
def tokenizer():
    inner = byte_tokenizer("<|end|>", MARKERS, "{{ messages[0].content }}{{ enable_thinking }}")
    return TokenizerWrapper(inner, tool_call_start="<tool_call>", tool_call_end="</tool_call>", tool_parser=len)


def test_the_version_is_the_one_that_is_pinned():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"mlx-lm=={version('mlx-lm')}" in project["project"]["optional-dependencies"]["lm"]


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (load_tokenizer, ["model_path", "tokenizer_config_extra", "eos_token_ids"]),
        (load_config, ["model_path"]),
        (convert_chat, ["messages", "role_mapping"]),
        (TokenizerWrapper.rfind_think_start, ["self", "tokens", "start", "end"]),
        (TokenizerWrapper.rfind_think_end, ["self", "tokens", "start", "end"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_functions_have_the_parameters(function, parameters):
    assert list(inspect.signature(function).parameters) == parameters


def test_a_template_has_the_arguments_of_transformers():
    names = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert {"tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"} <= names


def test_a_tokenizer_has_the_markers(tokenizer):
    begin, end, call, ends = tokenizer.convert_tokens_to_ids(MARKERS)
    assert tokenizer.has_chat_template and tokenizer.has_thinking and tokenizer.has_tool_calling
    assert (tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens)) == ((begin,), (end,))
    assert (tuple(tokenizer.tool_call_start_tokens), tuple(tokenizer.tool_call_end_tokens)) == ((call,), (ends,))
    assert (tuple(tokenizer.structural_markers), tokenizer.response_initial_state) == ((), None)
    assert tokenizer.eos_token_ids == {256} and tokenizer.tool_parser is len
    assert isinstance(tokenizer._tokenizer, PreTrainedTokenizerBase) and tokenizer._chat_template is None


def test_a_tokenizer_without_markers_has_none():
    tokenizer = TokenizerWrapper(byte_tokenizer("<|end|>"))
    assert not (tokenizer.has_chat_template or tokenizer.has_thinking or tokenizer.has_tool_calling)
    assert tokenizer.tool_call_start_tokens is None and tokenizer.tool_parser is None


def test_the_text_of_a_chat_has_the_tokens_of_the_chat(tokenizer):
    """The length of the text is checked before it is made into tokens."""
    messages = [{"role": "user", "content": "<think>Zürich</think>"}]
    text = tokenizer.apply_chat_template(messages, tools=None, tokenize=False, enable_thinking=False)
    assert text == "<think>Zürich</think>False"
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.apply_chat_template(
        messages, tools=None, tokenize=True, enable_thinking=False
    )


def test_a_chat_without_a_template_is_written_with_roles():
    roles = {"user": "Q: ", "assistant": "A: ", "stop": "\n"}
    assert convert_chat([{"role": "user", "content": "ring?"}], roles) == "Q: ring?\nA:"


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)])
def test_a_parser_of_tools_has_its_markers(name):
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    assert isinstance(module.tool_call_start, str) and isinstance(module.tool_call_end, str)
    assert len(inspect.signature(module.parse_tool_call).parameters) == 2
