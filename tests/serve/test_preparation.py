"""Requests as tokens: those of mlx-lm's server, and what differs from it on purpose."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlx_lm.server import CompletionRequest, ResponseGenerator
from mlx_lm.utils import load_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from mlxdist.serve.preparation import Limits, Preparation
from mlxdist.serve.protocol import Detokenize, Generate, Grammar, Prompt, Tokenize
from mlxdist.serve.refusal import Refusal
from mlxdist.tools.bench.byte_model import byte_tokenizer

LIMITS = Limits(context=2048, vocabulary=300)
HELLO = {"role": "user", "content": "What is the weather in Zürich?"}
SYSTEM = {"role": "system", "content": "You are a weather service. Answer briefly."}
ANSWER = {"role": "assistant", "content": "Cloudy, 12 degrees."}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Zürich"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "cloudy, 12"}

# As Qwen's, but short: tools in the system prompt, calls with their arguments as an object, thoughts.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}"
    "<tool_call>{{ tool_call.name }}("
    "{% for name, value in tool_call.arguments.items() %}{{ name }}={{ value }}{% endfor %})</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking and begins %}<think>\n{% elif begins %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]
MODELS = {
    "plain": (CHAT_TOKENS, PLAIN),
    "thinks": ([*CHAT_TOKENS, "<think>", "</think>", "<tool_call>", "</tool_call>"], CHATML),
    "other thoughts": ([*CHAT_TOKENS, "<longcat_think>", "</longcat_think>"], PLAIN + "<longcat_think>"),
    "channels": ([*CHAT_TOKENS, "<|channel>", "<channel|>"], PLAIN + "<|channel>thought\n"),
    "channels, closed": ([*CHAT_TOKENS, "<|channel>", "<channel|>"], PLAIN + "<|channel>thought\n<channel|>"),
    "kimi": (["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], PLAIN + "<|open|>think<|sep|>"),
    "no template": (CHAT_TOKENS, None),
}
CHATS = {
    "user": [HELLO],
    "system": [SYSTEM, HELLO],
    "two systems": [SYSTEM, {"role": "system", "content": "Use Celsius."}, HELLO],
    "turns": [SYSTEM, HELLO, ANSWER, {"role": "user", "content": "And tomorrow?"}],
    "answer": [HELLO, ANSWER],
    "result": [SYSTEM, HELLO, CALL, RESULT],
    "after a result": [HELLO, CALL, RESULT, ANSWER, HELLO],
    "thoughts": [HELLO, {"role": "assistant", "content": "<think>hm</think>No."}, {"role": "user", "content": "?"}],
    "thought by a user": [{"role": "user", "content": "what is <think>?"}],
    "empty": [{"role": "user", "content": ""}],
}


def save_model(folder, tokens=CHAT_TOKENS, template=PLAIN, begins_text=False, **config):
    """A model's directory as far as a tokenizer is concerned."""
    tokenizer = byte_tokenizer("<|end|>", tokens, template)
    if begins_text:
        first = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
        tokenizer.backend_tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[first]),
            ]
        )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 256} | config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_model(tmp_path_factory.mktemp(name.replace(" ", "-")), *model) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def chatml(folders):
    return Preparation(folders["thinks"], {})


def chat(messages, tools=(), prompt=None, **fields):
    return Generate(prompt=Prompt(messages=messages, tools=list(tools), **prompt or {}), **fields)


def text_of(preparation, call):
    return preparation.prepare(call.model_copy(update={"wants_prompt": True}), LIMITS).prompt_text


def mlx_lm_makes(folder, operator, messages, tools=None, arguments=None, text=""):
    """Tokens, segments and section by mlx-lm's server."""
    server = SimpleNamespace(
        model_provider=SimpleNamespace(cli_args=SimpleNamespace(chat_template_args=operator), processor=None)
    )
    kind = "chat" if messages else "text"
    request = CompletionRequest(kind, text, json.loads(json.dumps(messages)), tools, None)
    given = SimpleNamespace(chat_template_kwargs=arguments)
    tokens, parts, _, section, _ = ResponseGenerator._tokenize(server, load_tokenizer(folder), request, given)
    assert [token for part in parts for token in part] == tokens
    return tokens, [*map(len, parts)], section


@pytest.mark.parametrize("tools", [None, [LOOK]], ids=["", "tools"])
@pytest.mark.parametrize("model", MODELS)
def test_a_chat_has_the_tokens_segments_and_section_of_mlx_lm(folders, model, tools):
    operator = {"enable_thinking": True, "begins": True}
    preparation = Preparation(folders[model], operator)
    for name, messages in CHATS.items():
        for arguments in ({}, {"enable_thinking": False}, {"begins": False}):
            if model == "no template" and None in [message["content"] for message in messages]:
                continue  # mlx-lm writes "None"
            call = chat(messages, tools or (), {"template_arguments": arguments})
            made = preparation.prepare(call, LIMITS)
            expected = mlx_lm_makes(folders[model], operator, messages, tools, arguments)
            assert (made.tokens, made.segments, made.section) == expected, (name, arguments)


def test_the_segments_of_a_chat_that_thinks(chatml):
    """The prompts that the test above compares are not all one segment."""
    made = chatml.prepare(chat(CHATS["system"], prompt={"template_arguments": {"begins": True}}), LIMITS)
    assert (len(made.segments), made.section) == (3, "reasoning")


@pytest.mark.parametrize("begins_text", [False, True])
def test_a_text_has_the_tokens_of_mlx_lm(tmp_path, begins_text):
    folder = save_model(tmp_path, begins_text=begins_text)
    made = Preparation(folder, {}).prepare(Generate(prompt=Prompt(text="Once upon ä time")), LIMITS)
    assert (made.tokens, made.segments, made.section) == mlx_lm_makes(folder, {}, [], text="Once upon ä time")


def test_a_text_without_the_tokens_around_it(tmp_path):
    preparation = Preparation(save_model(tmp_path, begins_text=True), {})
    tokens = [
        preparation.prepare(Generate(prompt=Prompt(text="a", add_special_tokens=added)), LIMITS).tokens
        for added in (True, False)
    ]
    assert tokens[0] == [257, *tokens[1]] and len(tokens[1]) == 1


def test_the_operators_variables_of_the_template_are_defaults(folders):
    preparation = Preparation(folders["thinks"], {"begins": True, "enable_thinking": False})
    assert text_of(preparation, chat([HELLO])).endswith("</think>\n\n")
    wants = {"template_arguments": {"enable_thinking": True}}
    assert text_of(preparation, chat([HELLO], prompt=wants)).endswith("assistant\n<think>\n")


def test_a_template_that_takes_no_empty_question(tmp_path):
    """It is rendered with one to find the end of the system prompt, which is for the prefix cache alone."""
    template = "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
    made = Preparation(save_model(tmp_path, template=template + PLAIN), {}).prepare(chat(CHATS["system"]), LIMITS)
    assert made.segments == [len(made.tokens)]


def test_arguments_of_the_tokenizer_are_no_variables_of_the_template(chatml):
    for name in ("chat_template", "tokenize", "return_dict"):
        with pytest.raises(Refusal, match=f"chat_template_kwargs must not have {name}"):
            chatml.prepare(chat([HELLO], prompt={"template_arguments": {name: "x"}}), LIMITS)


def test_a_developer_is_the_system_where_the_template_has_no_developers(tmp_path, chatml):
    messages = [{"role": "developer", "content": "Be brief."}, HELLO]
    system = [{"role": "system", "content": "Be brief."}, HELLO]
    assert text_of(chatml, chat(messages)) == text_of(chatml, chat(system))
    assert chatml.prepare(chat(messages), LIMITS).segments == chatml.prepare(chat(system), LIMITS).segments
    template = PLAIN + "{# knows the role developer #}"
    assert "<|im_start|>developer\nBe brief." in text_of(
        Preparation(save_model(tmp_path, template=template), {}), chat(messages)
    )


def test_a_model_without_a_template_has_the_roles_of_the_request(folders):
    preparation = Preparation(folders["no template"], {})
    roles = {"user": "Q: ", "assistant": "A: ", "stop": "\n"}
    messages = [{"role": "user", "content": "ring?"}, {"role": "assistant", "content": None}]
    assert text_of(preparation, chat(messages, prompt={"role_mapping": roles})) == "Q: ring?\nA: \nA:"
    for name in ("continue_final_message", "add_generation_prompt"):
        fields = {name: name == "continue_final_message"}
        with pytest.raises(Refusal, match=f"{name} is not served with this model, which has no chat template"):
            preparation.prepare(chat(messages, prompt=fields), LIMITS)


def test_the_last_message_is_continued(chatml):
    messages = [HELLO, {"role": "assistant", "content": "It is "}]
    continued = text_of(chatml, chat(messages, prompt={"continue_final_message": True}))
    assert continued.endswith("<|im_start|>assistant\nIt is ")
    ended = text_of(chatml, chat(messages, prompt={"add_generation_prompt": False}))
    assert ended.endswith("<|im_start|>assistant\nIt is <|im_end|>\n")
    thinking = [HELLO, {"role": "assistant", "content": "<think>It may"}]
    made = chatml.prepare(chat(thinking, prompt={"continue_final_message": True}), LIMITS)
    assert made.section == "reasoning"


@pytest.mark.parametrize("arguments", ['{"city": "Zür', "", "Zürich", "[" * 1500, "null", "[1, 2]", '"{}"'])
def test_malformed_arguments_of_an_earlier_call_do_not_fail_the_chat(tmp_path, chatml, arguments):
    """A template that needs an object gets an empty one, another one the text."""
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = arguments
    assert "<tool_call>look()</tool_call>" in text_of(chatml, chat([HELLO, call, RESULT], [LOOK]))
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    written = text_of(Preparation(save_model(tmp_path, template=template + "."), {}), chat([HELLO, call]))
    assert written == (arguments or "{}") + "."


def test_a_template_that_is_a_function_of_mlx_lm(tmp_path):
    """DeepSeek's, which needs the arguments of earlier calls as text."""
    save_model(tmp_path, ["<think>", "</think>"], None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template_type": "deepseek_v32"}))
    preparation = Preparation(tmp_path, {})
    for name in ("user", "turns"):
        made = preparation.prepare(chat(CHATS[name], [LOOK]), LIMITS)
        assert (made.tokens, made.segments, made.section) == mlx_lm_makes(tmp_path, {}, CHATS[name], [LOOK])
    call = CALL | {"reasoning_content": "I look."}
    assert ">Zürich</" in text_of(preparation, chat([HELLO, call, RESULT], [LOOK]))
    developer = {"role": "developer", "content": "Be brief."}
    assert "Be brief." in text_of(preparation, chat([developer, HELLO]))


def test_a_request_is_not_changed(chatml):
    """One is prepared again after its process has died."""
    call = chat([SYSTEM, HELLO, CALL, {"role": "developer", "content": None}], [LOOK])
    before = call.model_dump_json()
    chatml.prepare(call, LIMITS)
    assert call.model_dump_json() == before


def test_tools_are_in_the_template_unless_the_choice_is_none(chatml):
    texts = {choice: text_of(chatml, chat([HELLO], [LOOK], tool_choice=choice)) for choice in ("none", "auto", "look")}
    assert "Looks up the weather." in texts["auto"] and texts["look"] == texts["auto"]
    assert texts["none"] == text_of(chatml, chat([HELLO]))


def test_the_format_of_calls(chatml):
    made = {
        choice: chatml.prepare(chat([HELLO], [LOOK], tool_choice=choice), LIMITS)
        for choice in ("none", "auto", "required", "look")
    }
    assert {choice: (each.calls, each.parses_tools, bool(each.grammar)) for choice, each in made.items()} == {
        "none": ("text", False, False),
        "auto": ("text", True, False),
        "required": ("list", True, True),
        "look": ("arguments", True, True),
    }
    with pytest.raises(Refusal, match="tool_choice names the function 'see', which tools does not have"):
        chatml.prepare(chat([HELLO], [LOOK], tool_choice="see"), LIMITS)
    with pytest.raises(Refusal, match="tool_choice is required, and the request has no tools"):
        chatml.prepare(chat([HELLO], tool_choice="required"), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt(text=""), "the prompt is empty"),
        (Prompt(tokens=[]), "the prompt is empty"),
        (Prompt(tokens=[1, 300]), "the prompt has a token that the model does not have: they are 0 to 299"),
        (Prompt(tokens=[-1]), "the prompt has a token that the model does not have"),
        (Prompt(messages=[]), "messages must have at least one message"),
        (Prompt(text="\ud800"), "the request cannot be made into tokens: "),
    ],
    ids=["text", "tokens", "large", "negative", "messages", "surrogate"],
)
def test_prompts_that_are_refused(chatml, prompt, words):
    with pytest.raises(Refusal, match=words) as caught:
        chatml.prepare(Generate(prompt=prompt), LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt(tokens=[1] * 2048), "the prompt has 2048 tokens, and at most 2047 are served here"),
        (Prompt(text="word " * 2000), "the prompt has 10000 tokens"),
        # Of no token with more than 12 characters can 2,047 have as many.
        (Prompt(text="word" * (1 << 19)), "the prompt has 2097152 characters, and at most 2047 tokens"),
        (Prompt(messages=[{"role": "user", "content": "word" * (1 << 19)}]), "the prompt has 20971.. characters"),
    ],
    ids=["tokens", "text", "long text", "long chat"],
)
def test_a_prompt_that_does_not_fit_has_openais_code(chatml, prompt, words):
    with pytest.raises(Refusal, match=words) as caught:
        chatml.prepare(Generate(prompt=prompt), LIMITS)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == ("messages" if prompt.messages else "prompt")


def test_spaces_that_a_template_or_tokenizer_leaves_out_are_not_counted(tmp_path):
    folder = save_model(tmp_path, template="{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    messages = [{"role": "user", "content": " " * 1_000_000 + "ring?"}]
    assert text_of(Preparation(folder, {}), chat(messages)) == "ring?"


def test_the_message_of_a_template_is_that_of_the_refusal(tmp_path):
    folder = save_model(tmp_path, template="{{ raise_exception('roles must alternate, see /usr/share/doc/chat') }}")
    with pytest.raises(Refusal, match=r"cannot be made into tokens: roles must alternate, see \.\.\.$"):
        Preparation(folder, {}).prepare(chat([HELLO]), LIMITS)


def test_a_grammar_with_tools_is_for_an_answer_that_calls_none(chatml, folders):
    """Its format is tested in test_structured_output.py."""
    wanted = Grammar(kind="json", value={"type": "object"})
    made = chatml.prepare(chat([HELLO], [LOOK], grammar=wanted), LIMITS)
    assert "@answer" in made.grammar and "CALL" in made.grammar
    with pytest.raises(Refusal, match="structured output is not served for chats with this model"):
        Preparation(folders["kimi"], {}).prepare(chat([HELLO], grammar=wanted), LIMITS)


def test_structured_output_needs_a_tokenizer_that_llguidance_reads(chatml):
    limits = replace(LIMITS, has_grammars=False)
    assert chatml.prepare(chat([HELLO], [LOOK]), limits).tokens
    for fields in ({"grammar": Grammar(kind="regex", value="a")}, {"tool_choice": "look"}):
        with pytest.raises(Refusal, match="whose tokenizer llguidance cannot read"):
            chatml.prepare(chat([HELLO], [LOOK], **fields), limits)


def test_tokens_and_their_text(chatml):
    """A prompt may be longer than the context."""
    made = chatml.tokenize(Tokenize(model="tiny", prompt=Prompt(messages=[HELLO])), Limits(4, 300))
    assert (made["model"], made["max_model_len"]) == ("tiny", 4)
    text = chatml.detokenize(Detokenize(tokens=made["tokens"]), LIMITS)["prompt"]
    assert text == text_of(chatml, chat([HELLO]))
    with pytest.raises(Refusal, match="tokens must be from 0 to 299"):
        chatml.detokenize(Detokenize(tokens=[1 << 40]), LIMITS)


def test_the_text_of_a_prompt_of_tokens(chatml):
    tokens = PreTrainedTokenizerFast.encode(chatml._tokenizer._tokenizer, "<|im_start|>ä")
    assert text_of(chatml, Generate(prompt=Prompt(tokens=tokens))) == "<|im_start|>ä"
