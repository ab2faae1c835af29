"""The application of HTTP before a rank 0 that does what a test says: paths, keys, origins, hosts, streams, the log."""

import contextlib
import hmac
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_zero import ADMITTED, FINISHED, PROGRESS, answer, events_of, launcher_server, message, said, started, texts_of
from waiting import wait_for

from mlxdist.serve.protocol import Failed, Output, ToolCall
from mlxdist.version import __version__

QUEUE_FULL = Failed(message="256 requests wait already; try again later", status=429, retry_after=7)


def chat(*events, **fields):
    return {"messages": [{"role": "user", "content": json.dumps([list(events)])}]} | fields


def test_it_imports_no_model():
    program = "import sys, mlxdist.serve.http_server; print(*{name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert not {"mlx", "mlx_lm", "transformers", "numpy"} & set(found.split())


def test_openais_client_has_an_answer_and_a_stream(client, rank_0):
    import openai

    call = ToolCall(name="weather", arguments='{"city": "Oslo"}')
    with openai.OpenAI(base_url=f"{client.server.address}/v1", api_key="none", max_retries=0) as there:
        whole = there.chat.completions.create(model="tiny", **chat(*answer("Hello", " you")))
        events = said(ADMITTED, Output(reasoning="Hm"), Output(content="Hello", tool_calls=[call]), FINISHED)
        chunks = list(there.chat.completions.create(model="tiny", stream=True, **chat(*events)))
        assert [model.id for model in there.models.list()] == ["tiny", "sql"]
    assert whole.choices[0].message.content == "Hello you" and whole.usage.completion_tokens == 2
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Hello"
    assert [each.function.name for delta in deltas for each in delta.tool_calls or ()] == ["weather"]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/health", 200),
        ("GET", "/health/", 200),
        ("GET", "/health?verbose=1", 200),
        ("HEAD", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/version", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/", 200),
        ("GET", "/v1/models?limit=5", 200),
        ("HEAD", "/v1/models", 200),
        ("GET", "/v1/models/sql", 200),
        ("GET", "/v1/models/org/name", 404),
        ("GET", "/v1/embeddings", 404),
        ("HEAD", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 204),
        ("GET", "http://localhost/v1/models", 200),
    ],
)
def test_paths_and_methods(client, rank_0, method, path, status):
    found, body, headers = client.request(method, path)
    assert found == status
    if method == "HEAD":
        assert body == ""
    elif status >= 400:
        assert body["error"]["type"] == "invalid_request_error"
    if status in (204, 405):
        assert {"GET", "HEAD"} <= set(headers["Allow"].split(", ")) or headers["Allow"] == "POST"


def test_the_version_is_the_packages(client):
    assert client.request("GET", "/version")[:2] == (200, {"version": __version__})


def test_metrics_are_those_of_rank_0(client, rank_0):
    status, text, headers = client.request("GET", "/metrics")
    own = 'mlxdist_serve_http_requests_total{path="/health",status="200"}'
    assert status == 200 and text.startswith("mlxdist_serve_running 0\n") and own in text
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_text_becomes_tokens_and_tokens_text(client, rank_0):
    assert client.request("POST", "/tokenize", {"prompt": "abc"})[1]["tokens"] == [97, 98, 99]
    assert client.request("POST", "/detokenize", {"tokens": [97, 98, 99]})[1] == {"prompt": "abc"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": "x", "max_tokens": "many"}', b"\xff"])
def test_a_malformed_body_is_a_400(client, rank_0, body):
    status, found, _ = client.request("POST", "/v1/completions", body)
    assert status == 400 and message(found) and rank_0.calls == []


def test_unknown_fields_are_refused_unless_the_operator_ignores_them(client, rank_0):
    status, found, _ = client.generate(answer("x"), best_off=3)
    assert (status, found["error"]["param"]) == (400, "best_off")
    with launcher_server(ignore_unknown_fields=True) as lenient, started(lenient):
        assert lenient.generate(answer("x"), best_off=3)[0] == 200


def test_a_refusal_of_rank_0_has_its_status(client, rank_0):
    for streams in (False, True):
        status, found, headers = client.generate(said(QUEUE_FULL), stream=streams)
        assert (status, message(found), headers["Retry-After"]) == (429, QUEUE_FULL.message, "7")
        assert (found["error"]["type"], found["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_an_error_in_a_stream_is_its_last_event(client, rank_0):
    failed = Failed(message="the grammar of the request has failed", status=500)
    _, text, _ = client.generate(said(ADMITTED, Output(content="He"), failed), stream=True)
    first, error = events_of(text)
    assert first["choices"][0]["text"] == "He" and message(error) == failed.message and "[DONE]" not in text


def test_progress_is_a_comment_in_a_stream(client, rank_0):
    events = said(ADMITTED, PROGRESS, Output(content="Hello"), FINISHED)
    _, text, headers = client.generate(events, stream=True)
    assert text.startswith(": keepalive 1/3\n\ndata: {") and texts_of(text) == ["Hello", ""]
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    status, found, _ = client.generate(events)
    assert (status, found["choices"][0]["text"]) == (200, "Hello")


def prompts(*choices):
    return [json.dumps([events]) for events in choices]


def test_several_choices_are_in_one_stream(client, rank_0):
    choices = prompts(answer("a", "b"), answer("c"), answer("d"))
    status, text, _ = client.request("POST", "/v1/completions", {"prompt": choices, "stream": True})
    found = ["", "", ""]
    for event in events_of(text)[:-1]:
        found[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert (status, found) == (200, ["ab", "c", "d"])
    status, whole, _ = client.request("POST", "/v1/completions", {"prompt": choices})
    assert [choice["text"] for choice in whole["choices"]] == ["ab", "c", "d"]


def test_a_choice_that_is_refused_cancels_the_others_before_the_headers(client, rank_0):
    choices = prompts([*answer("a")[:-1], "wait"], ["hold", *said(QUEUE_FULL)])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.request, "POST", "/v1/completions", {"prompt": choices, "stream": True})
        assert rank_0.holding.acquire(timeout=30)
        rank_0.go.set()
        status, found, _ = asked.result()
    assert (status, message(found)) == (429, QUEUE_FULL.message)
    assert wait_for(lambda: rank_0.left == [True])


def test_a_choice_that_fails_cancels_the_others(client, rank_0):
    failed = Failed(message="the tokens of the answer cannot be made into text", status=500)
    choices = prompts([*said(ADMITTED), "wait"], [*said(ADMITTED, Output(content="He")), "hold", *said(failed)])
    with contextlib.closing(client.connection()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": choices, "stream": True}))
        response = connection.getresponse()  # all are admitted: else it would be no stream
        rank_0.go.set()
        text = response.read().decode()
    assert message(events_of(text)[-1]) == failed.message
    assert wait_for(lambda: rank_0.left == [True])


def test_a_choice_may_wait_until_another_has_ended(client, rank_0):
    """Where the batch has one place: the first one is read to its end before the second one is admitted."""
    many = [Output(content="x" * 100) for _ in range(20_000)]
    choices = prompts([*said(ADMITTED, *many, FINISHED), "release"], ["hold", *answer("b")])
    status, found, _ = client.request("POST", "/v1/completions", {"prompt": choices})
    assert status == 200 and [len(choice["text"]) for choice in found["choices"]] == [2_000_000, 1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_chats_have_two_paths(client, rank_0, path):
    status, found, _ = client.request("POST", path, chat(*answer("Hello")))
    assert (status, found["choices"][0]["message"]["content"]) == (200, "Hello")


def test_all_but_health_needs_the_key():
    with launcher_server(api_key="a-long-key") as client, started(client):
        assert client.health()[0] == 200
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            status, found, headers = client.request("GET", path)
            assert (status, found["error"]["code"], headers["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")
        status, _, _ = client.request("GET", "/v1/models", Authorization="Bearer a-long-key")
        assert status == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
    """With hmac.compare_digest: how long it takes does not say how much of a guess is right."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    with launcher_server(api_key="a-long-key") as client:
        for key, status in (("a-long-kez", 401), ("a-long-key", 404)):
            assert client.request("GET", "/nothing", Authorization=f"Bearer {key}")[0] == status
    assert [given for given, _ in compared] == [b"Bearer a-long-kez", b"Bearer a-long-key"]


@pytest.mark.parametrize(
    "allowed, status", [((), 403), (("http://b.page",), 403), (("http://a.page",), 200), (("*",), 200)]
)
def test_pages_of_allowed_origins(allowed, status):
    with launcher_server(allowed_origins=allowed) as client, started(client):
        found, _, headers = client.request("GET", "/v1/models", Origin="http://a.page")
        assert (found, headers["Access-Control-Allow-Origin"] is not None) == (status, status == 200)
        asked = {"Origin": "http://a.page", "Access_Control_Request_Method": "POST"}
        asked["Access_Control_Request_Headers"] = "authorization, content-type, x-stainless-lang"
        found, _, headers = client.request("OPTIONS", "/v1/chat/completions", **asked)
        assert found == status
        if status == 200:
            assert "authorization" in headers["Access-Control-Allow-Headers"].lower()
            assert "x-stainless-lang" in headers["Access-Control-Allow-Headers"].lower()
            assert "POST" in headers["Access-Control-Allow-Methods"]


def test_a_page_can_read_the_error_of_its_request():
    with launcher_server(allowed_origins=("http://a.page",), api_key="a-long-key") as client:
        status, _, headers = client.request("GET", "/v1/models", Origin="http://a.page")
    assert (status, headers["Access-Control-Allow-Origin"]) == (401, "http://a.page")


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8080", 200),
        ("studio.local:8080", 200),
        ("evil.page", 403),
        ("evil.page:8080", 403),
        ("localhost.evil.page", 403),
        ("127.0.0.1.evil.page", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_names_that_a_dns_server_may_have_rebound_are_refused(host, status):
    with launcher_server(allowed_hosts=("Studio.local",)) as client, started(client):
        for path in ("/v1/models", "/health"):
            assert client.request("GET", path, Host=host)[0] == status


def test_all_names_are_served_where_it_does_not_listen_on_loopback():
    with launcher_server(host="0.0.0.0") as client, started(client):
        assert client.request("GET", "/v1/models", Host="studio.local")[0] == 200


def test_a_request_has_the_id_that_its_client_gives(client, rank_0):
    status, found, headers = client.generate(answer("x"))
    assert headers["X-Request-Id"] in found["id"] and len(headers["X-Request-Id"]) == 16
    body = {"prompt": json.dumps([answer("x")])}
    _, _, headers = client.request("POST", "/v1/completions", body, X_Request_Id="of-the-client/1")
    assert headers["X-Request-Id"] == "of-the-client/1"
    for wrong in ("x" * 129, "a b", "\xe9"):
        _, _, headers = client.request("GET", "/nothing", X_Request_Id=wrong)
        assert len(headers["X-Request-Id"]) == 16


def logged(capfd, path):
    lines = []

    def is_there():
        lines.extend(capfd.readouterr().err.splitlines())
        return any(path in line for line in lines)

    assert wait_for(is_there), lines
    return [line for line in lines if path in line]


def test_the_access_log_has_a_line_a_request(capfd, client, rank_0):
    client.request("POST", "/v1/completions", {"prompt": json.dumps([answer("x")])}, X_Request_Id="first")
    (line,) = logged(capfd, "completions")
    assert line.startswith("mlxdist: first POST /v1/completions 200, 3 (1 cached) + 2 tokens, first byte after 0.")
    assert line.endswith(" s: stop")
    client.generate(said(QUEUE_FULL))
    assert logged(capfd, "completions")[0].endswith(": refused")
    client.generate(said(ADMITTED, Failed(message="late", status=504)), stream=True)
    assert logged(capfd, "completions")[0].endswith(": timeout")
    client.request("GET", "/a%0Ab%22")
    assert ' GET /a\\nb\\" 404, ' in logged(capfd, "/a")[0]


def test_a_client_that_leaves_is_in_the_access_log(capfd, client, rank_0):
    with client.connect() as connection:
        connection.sendall(client.raw([*said(ADMITTED), "wait"], stream=True))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert logged(capfd, "completions")[0].endswith(": cancelled")
    assert wait_for(lambda: rank_0.left == [True])


def test_the_access_log_may_be_json(capfd):
    with launcher_server(log_format="json") as client, started(client):
        client.generate(answer("x"), stream=True)
        line = json.loads(logged(capfd, "completions")[0])
    assert line["method"] == "POST" and line["path"] == "/v1/completions" and line["status"] == 200
    counts = [line[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
    assert (counts, line["outcome"]) == ([3, 1, 2], "stop")
    assert 0 < line["first_byte_seconds"] <= line["seconds"]


def test_there_may_be_no_access_log(capfd):
    with launcher_server(access_log=False) as client, started(client):
        assert client.generate(answer("x"))[0] == 200
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_application_is_a_500_and_a_line(capfd, client, rank_0, monkeypatch):
    monkeypatch.setattr("mlxdist.serve.api.CompletionRequest.calls", lambda self: 1 / 0)
    status, found, _ = client.generate(answer("x"))
    assert (status, message(found)) == (500, "the server has failed at this request")
    (line,) = [line for line in logged(capfd, "mlxdist") if "ZeroDivisionError" in line]
    assert "test_application.py" in line and client.health()[0] == 200
