"""Random words of the answers of a BPE tokenizer's model as stop words, against the answers without them."""

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from bpe_models import CONTROL, save_bpe_model_folder
from mlx_lm import load
from mlx_lm.generate import make_text_state_machine
from serving import ServerProcess
from stop_words_reference import contents_of, length_of
from test_speculation import save_draft_folder

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% for tool_call in message.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}{% endfor %}{% if thinks %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bpe_model_folder(tmp_path_factory.mktemp("model") / "tiny", template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load(str(folder))[1]


def random_body(generator, tokenizer):
    """A request without stop words, and the path that it goes to."""
    body = {"max_tokens": generator.choice([20, 60]), "priority": generator.randrange(3)}
    question = generator.choice(["the answer", "слово", "停止词 ", "a word, naïve"]) * generator.choice([1, 9])
    if generator.random() < 0.8:
        body |= {"temperature": 1.0, "seed": generator.getrandbits(64)}
    if generator.random() < 0.2:
        expression = generator.choice(["[a-zéü ]{9,60}", "(END|[a-z],){3,20}", "[а-я停止词]{5,40}"])
        return body | {"prompt": question, "logprobs": 0, "structured_outputs": {"regex": expression}}, TEXT
    if generator.random() < 0.5:
        return body | {"prompt": question, "logprobs": 0}, TEXT
    body["logprobs"] = True
    body["logit_bias"] = {str(tokenizer.convert_tokens_to_ids(token)): 6.0 for token in CONTROL}
    thinks = {"thinks": generator.random() < 0.3}
    return body | {"messages": [{"role": "user", "content": question}], "chat_template_kwargs": thinks}, CHAT


def random_words(generator, text):
    """Words of a text, and others, which may have the same beginnings."""
    words = []
    for _ in range(generator.choice([1, 1, 2, 4])):
        start = generator.randrange(len(text))
        words.append(text[start : start + generator.choice([1, 2, 3, 6, 15])])
    if generator.random() < 0.3:
        words.append(words[0] + "!?")
    return words[0] if len(words) == 1 and generator.random() < 0.5 else words


def texts_of(tokenizer, tokens):
    """The text that comes with each of the tokens of an answer, by mlx-lm's detokenizer."""
    detokenizer, found = tokenizer.detokenizer, []
    for number, token in enumerate(tokens):
        if token not in tokenizer.eos_token_ids:
            detokenizer.add_token(token)
        if number == len(tokens) - 1:
            detokenizer.finalize()
        found.append(detokenizer.last_segment)
    if found and tokens[-1] in tokenizer.eos_token_ids:
        found[-1] = found[-1].rstrip("\ufffd")
    return found


def answer_of(server, body, path):
    """(text, reasoning, finish_reason, tokens with logprobs, completion_tokens), whole or of a stream."""
    if not body.get("stream"):
        answer = server.ask(body, path)
        choices, usage = answer["choices"], answer["usage"]
    else:
        *events, last, done = server.stream(body | {"stream_options": {"include_usage": True}}, path)
        choices, usage = [json.loads(event)["choices"][0] for event in events], json.loads(last)["usage"]
        assert done == "[DONE]"
    messages = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(message.get("content") or message.get("text") or "" for message in messages)
    reasoning = "".join(message.get("reasoning") or "" for message in messages)
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for each in logprobs for token in each.get("token_ids") or [one["id"] for one in each["content"]]]
    return text, reasoning, choices[-1]["finish_reason"], tokens, usage["completion_tokens"]


def expected_of(tokenizer, tokens, words, path, thinks):
    """The same of an answer whose tokens without stop words are these."""
    parts = texts_of(tokenizer, tokens)
    words = [words] if isinstance(words, str) else words
    if path == TEXT:  # which has no sections
        text = "".join(parts)
        cut = min((text.find(word) for word in words if word in text), default=None)
        content, reasoning = text[:cut], ""
    else:
        machine, initial = make_text_state_machine(tokenizer), "reasoning" if thinks else "normal"
        content, reasoning, cut = contents_of("".join(parts), words, machine, initial)
    kept = len(tokens) if cut is None else length_of(parts, cut) + 1
    return content, reasoning, None if cut is None else "stop", tokens[:kept], kept


CASES = [
    (1, []),
    (2, ["--prompt-lookup"]),
    (2, ["--draft-model", "DRAFT"]),
    (2, ["--pipeline"]),
    (3, []),
    (3, ["--pipeline"]),
    (2, ["--split-blocks"]),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, options, requests", [(2, [], 16), *(pytest.param(*case, 150, marks=pytest.mark.long) for case in CASES)]
)
def test_an_answer_ends_before_the_first_stop_word(folder, tokenizer, tmp_path, ranks, options, requests):
    generator, ends = random.Random(f"{ranks} {options}"), Counter()
    options = [save_draft_folder(folder, tmp_path / "draft") if option == "DRAFT" else option for option in options]

    def compare(seed):
        generator = random.Random(seed)
        body, path = random_body(generator, tokenizer)
        *_, reason, tokens, _ = answer_of(server, body, path)
        text = "".join(texts_of(tokenizer, tokens))
        words = random_words(generator, text or "nothing")
        thinks = body.get("chat_template_kwargs", {}).get("thinks", False)
        expected = expected_of(tokenizer, tokens, words, path, thinks)
        found = answer_of(server, body | {"stop": words, "stream": generator.random() < 0.5}, path)
        assert found[2] == (expected[2] or reason) and found[:2] == expected[:2] and found[3:] == expected[3:], (
            body,
            words,
        )
        ends[expected[2] or reason] += 1

    limits = ["--decode-concurrency", 3, "--max-context", 200]  # with priorities: some are preempted
    with ServerProcess(folder, ranks, *limits, *options) as server, ThreadPoolExecutor(6) as threads:
        list(threads.map(compare, [generator.getrandbits(64) for _ in range(requests)]))
        assert server.metrics()["preempted_total"] > 0 or requests < 100
        assert server.stop() == 0, "".join(server.lines)
    assert ends["stop"] > requests * 0.8
