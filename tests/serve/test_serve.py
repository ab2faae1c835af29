"""`mlxdist serve` over HTTP: on any number of ranks it answers what mlx-lm computes on one process."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.server import _make_logits_processors, _make_sampler
from serving import CONTEXT, PLAIN, VOCABULARY, ServerProcess, post, random_request, save_model_folder
from waiting import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"logit_bias": {"256": -100}}  # the token that ends an answer
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(
    scope="module",
    params=["2", *(pytest.param(name, marks=pytest.mark.long) for name in ("1", "3", "2 stages", "3 stages"))],
)
def server(request, model):
    ranks, *stages = request.param.split()
    options = ["--pipeline"] if stages else []
    with ServerProcess(model, int(ranks), "--prefill-step-size", 16, *options) as server:
        yield server
        assert server.stop() == 0, "".join(server.lines)


@pytest.fixture(scope="module")
def expected(model):
    """A function: what mlx-lm answers on one process to a request of /v1/completions, by the way of its server."""
    loaded, tokenizer = load(str(model))

    def text(body):
        sampling = replace(PLAIN.sampling, temperature=body.get("temperature", 0.0), top_p=body.get("top_p", 1.0))
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        request = replace(
            PLAIN,
            sampling=sampling,
            logits=replace(PLAIN.logits, logit_bias=bias, repetition_penalty=body.get("repetition_penalty", 0.0)),
        )
        mx.random.seed(body.get("seed", 0))
        made = stream_generate(
            loaded,
            tokenizer,
            body["prompt"],
            max_tokens=body["max_tokens"],
            sampler=_make_sampler(request, tokenizer),
            logits_processors=_make_logits_processors(request),
        )
        found = "".join(response.text for response in made)
        ends = [found.find(word) for word in body.get("stop", []) if word in found]
        # Of a character that is not complete mlx-lm's server says nothing where the answer ends by itself.
        return (found[: min(ends)] if ends else found).rstrip("\ufffd")

    return text


def test_overlapping_requests_are_answered_as_by_one_process(server, expected):
    generator = random.Random(1)
    bodies = [random_request(generator) for _ in range(12)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(server.ask, bodies))
    assert [answer["choices"][0]["text"].rstrip("\ufffd") for answer in answers] == [expected(body) for body in bodies]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} <= {"length", "stop"}


def test_a_stream_is_the_answer_in_parts(server):
    body = {"prompt": "a stream", "max_tokens": 20, "seed": 3, "temperature": 0.9} | ENDLESS
    *parts, usage, done = server.stream(body | {"stream_options": {"include_usage": True}})
    parsed = [json.loads(part)["choices"][0] for part in parts]
    assert "".join(part["text"] for part in parsed) == server.text(**body)
    assert parsed[-1]["finish_reason"] == "length" and done == "[DONE]" and len(parts) > 1
    assert json.loads(usage)["usage"]["completion_tokens"] == 20


def test_chat_with_a_system_prompt_and_logprobs(server):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, "model": "tiny"} | ENDLESS
    answer = server.ask(body, CHAT)
    choice = answer["choices"][0]
    streamed = [json.loads(event) for event in server.stream(body, CHAT)[:-1]]
    assert (
        "".join(part["choices"][0]["delta"].get("content") or "" for part in streamed) == choice["message"]["content"]
    )
    assert len(choice["logprobs"]["content"]) == 6 and answer["model"] == "tiny"
    for entry in choice["logprobs"]["content"]:
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(top) == 3 and top == sorted(top, reverse=True) and top[0] == entry["logprob"] <= 0
    again = server.ask(body | {"messages": [messages[0], {"role": "user", "content": "other"}]}, CHAT)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len("be brief")


def test_choices_are_the_answers_of_their_seeds(server):
    """Of two prompts; in a stream, too."""
    body = {"prompt": ["one", "another"], "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12} | ENDLESS
    alone = [
        server.text(**body | {"prompt": prompt, "n": 1, "seed": seed})
        for prompt in body["prompt"]
        for seed in (7, 8, 9)
    ]
    answer = server.ask(body)
    assert [choice["text"] for choice in answer["choices"]] == alone and len(set(alone)) > 3
    assert answer["usage"]["completion_tokens"] == 6 * 12
    assert answer["usage"]["prompt_tokens"] == len("oneanother")
    parts = [json.loads(event)["choices"][0] for event in server.stream(body)[:-1]]
    assert ["".join(part["text"] for part in parts if part["index"] == index) for index in range(6)] == alone


def logprobs_of(choice):
    """(token, log-probability, likely tokens) of each token of a choice or of a part of one."""
    found = choice.get("logprobs") or {"content": []}
    close = lambda value: pytest.approx(value, abs=1e-3)
    if "content" in found:
        rows = [(entry["id"], entry["logprob"], entry["top_logprobs"]) for entry in found["content"]]
        return [
            (token, close(value), [(top["id"], close(top["logprob"])) for top in tops]) for token, value, tops in rows
        ]
    rows = zip(found["token_ids"], found["token_logprobs"], found["top_logprobs"], strict=True)
    return [(token, close(value), {text: close(top) for text, top in tops.items()}) for token, value, tops in rows]


@pytest.mark.parametrize(
    "path, asked",
    [
        (TEXT, {"prompt": "x", "logprobs": 0}),
        (TEXT, {"prompt": "x", "logprobs": 3}),
        (CHAT, {"messages": [HELLO], "logprobs": True}),
        (CHAT, {"messages": [HELLO], "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_the_parts_of_a_stream_have_the_logprobs_of_their_tokens(server, path, asked):
    """Those of the whole answer, each once; also of tokens that are a part of a character, or end the answer."""
    body = asked | {"max_tokens": 100, "temperature": 1.0, "seed": 11}
    whole = logprobs_of(server.ask(body, path)["choices"][0])
    parts = [json.loads(event)["choices"][0] for event in server.stream(body, path)[:-1]]
    assert [entry for part in parts for entry in logprobs_of(part)] == whole
    assert len(whole) > 2 and len(parts) > 1  # how many tokens a part has depends on the machine


def test_stop_words_end_an_answer_and_are_no_part_of_it(server):
    body = {"prompt": "stop words", "max_tokens": 40, "temperature": 1.0, "seed": 5} | ENDLESS
    full = server.text(**body)
    word = next(full[i : i + 2] for i in range(4, 30) if full[i : i + 2].isascii())
    answer = server.ask(body | {"stop": [word, "never"]})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (full[: full.index(word)], "stop", word)
    more = server.ask(body | {"stop": [word], "include_stop_str_in_output": True})["choices"][0]["text"]
    assert more == full[: full.index(word) + len(word)]


def test_a_prefix_is_computed_once(server):
    prompt = "the same beginning of a long prompt " * 4
    before = server.metrics()
    assert server.text(prompt + "first") != server.text(prompt + "second")
    answer = server.ask({"prompt": prompt + "third", "max_tokens": 4})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)
    grown = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert grown["cached_prompt_tokens_total"] == 2 * len(prompt)
    assert grown["prompt_tokens_total"] == 3 * len(prompt) + len("firstsecondthird")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_and_the_others_go_on(server, expected, stream):
    before = server.metrics()['requests_total{outcome="cancelled"}']
    other = {"prompt": "who stays", "max_tokens": 60} | ENDLESS
    body = {"prompt": "who leaves", "max_tokens": 480, "stream": stream} | ENDLESS
    with ThreadPoolExecutor(1) as threads:
        with server.raw(post(body)):
            stays = threads.submit(server.ask, other)
            assert wait_for(lambda: server.metrics()["running"] >= 1, 30)
        assert stays.result()["choices"][0]["text"].rstrip("\ufffd") == expected(other)
    assert wait_for(lambda: server.metrics()["running"] == 0, 30)
    assert wait_for(lambda: server.metrics()['requests_total{outcome="cancelled"}'] == before + 1, 30)


BAD = {
    "temperature: NaN": ({"temperature": float("nan")}, 400, "NaN is not a number of JSON"),
    "temperature: 1e999": (b'{"prompt": "x", "temperature": 1e999}', 400, "1e999 is not a finite number"),
    "temperature: 101": ({"temperature": 101}, 400, "temperature must be a number from 0 to 100"),
    "temperature: tiny": ({"temperature": 1e-30}, 400, "temperature must be 0 or at least 0.0001"),
    "temperature: text": ({"temperature": "hot"}, 400, "temperature must be a number"),
    "top_p": ({"top_p": 1.5}, 400, "top_p must be a number from 0 to 1"),
    "top_k": ({"top_k": VOCABULARY}, 400, f"top_k must be less than {VOCABULARY}"),
    "min_p: NaN": ({"min_p": float("nan")}, 400, "NaN is not a number of JSON"),
    "xtc_threshold": ({"xtc_threshold": 0.9}, 400, "xtc_threshold must be a number from 0 to 0.5"),
    "repetition_penalty": ({"repetition_penalty": float("inf")}, 400, "Infinity is not a number of JSON"),
    "presence_penalty": ({"presence_penalty": -1e300}, 400, "presence_penalty must be a number from -100 to 100"),
    "context size": ({"repetition_context_size": 1 << 70}, 400, "repetition_context_size must be an integer from 0 to"),
    "max_tokens: 0": ({"max_tokens": 0}, 400, "max_tokens must be an integer from 1"),
    "max_tokens: huge": ({"max_tokens": 1 << 80}, 400, "max_tokens must be an integer from 0"),
    "seed: negative": ({"seed": -(2**63) - 1}, 400, "seed must be an integer from -2**63 to 2**64 - 1"),
    "seed: huge": ({"seed": 1 << 64}, 400, "seed must be an integer from -2**63 to 2**64 - 1"),
    "logit_bias: no such token": ({"logit_bias": {str(VOCABULARY): 1}}, 400, "logit_bias must have tokens from 0"),
    "logit_bias: -1": ({"logit_bias": {"-1": 1}}, 400, "'-1' is wrong"),
    "logit_bias: NaN": ({"logit_bias": {"1": float("nan")}}, 400, "NaN is not a number of JSON"),
    "logit_bias: null": ({"logit_bias": {"1": None}}, 400, "logit_bias must be an object of tokens"),
    "logit_bias: many": ({"logit_bias": {str(i): 0 for i in range(301)}}, 400, "logit_bias must have at most 300"),
    "stop: 10^6 words": ({"stop": ["x"] * 10**6}, 400, "stop must be a string or up to 16"),
    "stop: empty": ({"stop": [""]}, 400, "stop must be a string or up to 16"),
    "stop: long": ({"stop": "x" * 257}, 400, "of 1 to 256 characters"),
    "stop: number": ({"stop": [5]}, 400, "stop must be a string or up to 16"),
    "stop: surrogate": (b'{"prompt": "x", "stop": "\\ud800"}', 400, "stop has half of a surrogate pair"),
    "priority": ({"priority": 101}, 400, "priority must be an integer from -100 to 100"),
    "priority: number": ({"priority": 0.5}, 400, "priority must be an integer"),
    "stream_options": ({"stream": True, "stream_options": 0}, 400, "stream_options must be an object"),
    "model": ({"model": "/etc"}, 404, "the model served here is tiny"),
    "model: list": ({"model": ["tiny"]}, 400, "model must be a string"),
    "adapters": ({"adapters": "/etc/passwd"}, 404, "the model is served with no adapter"),
    "draft_model": ({"draft_model": "/tmp"}, 400, "draft_model is not served"),
    "n": ({"n": 17}, 400, "n must be an integer from 1 to 16"),
    "unknown": ({"temprature": 1}, 400, "did you mean temperature?"),
    "best_of": ({"best_of": 2}, 400, "best_of is not served"),
    "stop_token_ids": ({"stop_token_ids": [VOCABULARY]}, 400, "stop_token_ids must have tokens from 0 to"),
    "top_logprobs": ({"top_logprobs": 21}, 400, "top_logprobs must be an integer from 0 to 20"),
    "prompt: list": ({"prompt": [5.5]}, 400, "prompt must have tokens only"),
    "prompt: none": (b"{}", 400, "prompt is missing"),
    "prompt: empty": ({"prompt": ""}, 400, "the prompt is empty"),
    "prompt: surrogate": (b'{"prompt": "\\udfff"}', 400, "prompt has half of a surrogate pair"),
    "prompt: huge": ({"prompt": "x" * CONTEXT}, 400, f"the prompt has {CONTEXT} tokens, and at most {CONTEXT - 1}"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "byte 12 of the body is not of UTF-8"),
    "not JSON": (b"{", 400, "Invalid JSON in request body"),
    "no object": (b"[]", 400, "the body is not a JSON object"),
    "deep": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", 400, "more than 32 lists and objects"),
    "deeper": (b"[" * 100_000, 400, "more than 32 lists and objects"),
    "long number": (b'{"seed": ' + b"9" * 5000 + b"}", 400, "Invalid JSON in request body"),
    "large": (b" " * ((8 << 20) + 1), 413, "the body must have at most 8388608 bytes"),
}  # fmt: skip
BAD_CHATS = {
    "messages: none": ({"max_tokens": 1}, 400, "messages is missing"),
    "messages: empty": ({"messages": []}, 400, "messages must not be empty"),
    "messages: text": ({"messages": "hello"}, 400, "messages must be a list"),
    "role": ({"messages": [{"content": "x"}]}, 400, "messages[0].role is missing"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content must be a string"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}]},
        400,
        "images, audio and files are not served here",
    ),
    "tools": ({"messages": [HELLO], "tools": ["x"]}, 400, "tools[0] must be an object"),
    "tool_calls": ({"messages": [HELLO | {"tool_calls": [5]}]}, 400, "messages[0].tool_calls[0] must be an object"),
    "template": (
        {"messages": [HELLO], "chat_template_kwargs": {"chat_template": "{{ 1 }}", "tokenize": False}},
        400,
        "chat_template_kwargs must not have chat_template, tokenize",
    ),
}  # fmt: skip


def test_what_cannot_be_served_is_refused_with_a_sentence_and_changes_nothing(server):
    good = {"prompt": "a good one", "max_tokens": 8}
    text, before = server.text(**good), server.metrics()
    for path, table in ((TEXT, BAD), (CHAT, BAD_CHATS)):
        for name, (body, status, words) in table.items():
            if isinstance(body, dict) and path == TEXT:
                body = {"prompt": "x", "max_tokens": 2} | body
            found, answer, _ = server.request(body, path)
            assert (found, words in answer["error"]["message"]) == (status, True), (name, found, answer)
            assert "/site-packages" not in answer["error"]["message"] and "\n" not in answer["error"]["message"], name
    after = server.metrics()
    refused = lambda metrics: sum(
        value for name, value in metrics.items() if re.match(r"http_requests.*status=.4", name)
    )
    assert refused(after) - refused(before) == len(BAD) + len(BAD_CHATS)
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"]
    assert server.text(**good) == text


@pytest.mark.parametrize(
    "line, headers, status",
    [
        (b"POST /v1/completions HTTP/1.1", b"Content-Length: +2", 400),
        (b"POST /v1/completions HTTP/1.1", b"Content-Length: -1", 400),
        (b"POST /v1/completions HTTP/1.1", b"Content-Length: 2\r\nContent-Length: 3", 400),
        (b"POST /v1/completions HTTP/1.1", b"Content-Length: 999999999999", 413),
        (b"POST /v1/completions HTTP/1.1", b"Origin: http://a.page\r\nContent-Length: 2", 403),
        (b"POST /v1/completions HTTP/1.1", b"Transfer-Encoding: gzip", 400),
        (b"POST /v1/../../etc/passwd HTTP/1.1", b"Content-Length: 2", 404),
        (b"GET /v1/models/..%2f..%2fetc HTTP/1.1", b"", 404),
        (b"GET /v1/models/other HTTP/1.1", b"", 404),
        (b"GET /v1/modelstiny HTTP/1.1", b"", 404),
        (b"GET /etc/passwd HTTP/1.1", b"", 404),
        (b"DELETE /v1/models HTTP/1.1", b"", 405),
        (b"GET /v1/completions HTTP/1.1", b"", 405),
        (b"GET /health HTTP/2", b"", 400),
        (b"nonsense", b"", 400),
    ],
)
def test_bytes_that_are_no_request(server, line, headers, status):
    lines = [line, b"Host: localhost", b"Connection: close", headers]
    with server.raw(b"\r\n".join([*filter(None, lines), b"", b"{}"])) as connection:
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and json.loads(body)["error"]["message"], (head, body)


def test_health_models_and_metrics(server):
    assert server.ask(None, "/health") == {"status": "ok"}
    (found,) = server.ask(None, "/v1/models")["data"]
    assert found["id"] == "tiny" and server.ask(None, "/v1/models/tiny") == found | {
        "created": pytest.approx(found["created"], abs=60)
    }
    assert server.text("counted")
    metrics = server.metrics()
    assert metrics["time_to_first_token_seconds_count"] > 0 and metrics["queued"] == 0
    # A message has 1 KiB, and what admitted requests bring: at least 4 bytes for each token of their prompts.
    assert (
        metrics["decision_bytes_total"] <= 1024 * metrics["steps_total"] + 5 * metrics["prompt_tokens_total"] + 50_000
    )


@pytest.mark.long
def test_the_name_of_a_model_in_the_current_directory(model):
    with ServerProcess(".", cwd=model) as server:
        assert [each["id"] for each in server.ask(None, "/v1/models")["data"]] == ["tiny"]
        assert server.ask({"prompt": "x", "max_tokens": 1, "model": "tiny"})["model"] == "tiny"


@pytest.mark.long
def test_one_broadcast_per_step(run_ranks, model):
    for output in run_ranks("serving.py", 2, model):
        assert output.endswith("ok\n")


@pytest.mark.long
def test_a_rank_that_samples_other_tokens_is_a_mismatch(run_ranks, model):
    for output in run_ranks("serving.py", 2, model, "diverge", status=None):
        assert re.search(r"Mismatch: ranks call the model .* with different inputs, .* rank 0 and .* rank 1", output)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_class(run_ranks, model, ranks):
    run_ranks("server.py", ranks, model)
