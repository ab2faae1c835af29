"""The client of rank 0 in the launcher, behind its HTTP server: outages, second attempts, and what ends both."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_zero import (
    ADMITTED,
    FINISHED,
    PROGRESS,
    REASON,
    SECRET,
    FakeRankZero,
    TcpSocket,
    answer,
    events_of,
    launcher_server,
    message,
    named_events_of,
    said,
    started,
    texts_of,
)
from waiting import wait_for

from mlxdist.serve.listener import SOCKET
from mlxdist.serve.protocol import Failed, Output


@pytest.fixture(params=["here", "on another host"])
def client(client, request):
    """A server whose rank 0 is here, or is reached by TCP."""
    client.is_elsewhere = request.param == "on another host"
    return client


FAILED = Failed(message="the server has failed: rank 1 has died", status=503)
LATE = Failed(message="the request has taken too long", status=504)
EXPLAINED = f"the server has failed: {REASON}"


def test_requests_before_the_ranks_are_ready_get_the_reason(client):
    status, body, headers = client.health()
    assert (status, body) == (503, {"status": "unavailable", "reason": "the model is being loaded"})
    assert headers["Retry-After"] is None
    status, body, _ = client.generate(answer("x"))
    assert (status, message(body)) == (503, "the model is being loaded")
    assert client.server.seconds_ready() == 0


def test_retry_after_is_the_time_of_the_last_start(client):
    with started(client) as rank_0:
        rank_0.end()
        assert client.server.seconds_ready() > 0
        client.server.failed(REASON, 2.0)
        assert wait_for(lambda: client.health()[1].get("reason") == EXPLAINED)
        status, body, headers = client.generate(answer("x"))
    assert (status, message(body)) == (503, EXPLAINED) and 1 <= int(headers["Retry-After"]) <= 4
    assert client.server.seconds_ready() == 0  # until the next start is ready: the launcher may fail to make one


def test_rank_0_that_does_not_serve_yet_says_why(client):
    rank_0 = FakeRankZero(is_elsewhere=client.is_elsewhere)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(rank_0.end)
        rank_0.reason = "the prefix cache is being read"
        client.server.starting(rank_0.place, SECRET.hex())
        status, body, _ = client.generate(answer("x"))
    assert (status, message(body)) == (503, "the model is being loaded")  # the launcher's reason is the first


# What rank 0 may have sent when it ends: nothing of the answer.
NO_OUTPUT = {
    "nothing": ["die"],
    "a place": [*said(ADMITTED), "die"],
    "progress": [*said(ADMITTED, PROGRESS), "die"],
    "a part of an event": [*said(ADMITTED), "send_half", "die"],
    "an error": ["fail", *said(FAILED), "die"],
    "an error after progress": [*said(ADMITTED, PROGRESS), "fail", *said(FAILED), "die"],
}


def restarted(client, rank_0):
    assert wait_for(lambda: not rank_0.temporary.exists())
    client.server.failed(REASON, 1.0)
    return started(client, rank_0)


@pytest.mark.parametrize("first", NO_OUTPUT)
@pytest.mark.parametrize("streams", [False, True])
def test_a_request_without_output_is_computed_again(client, rank_0, first, streams):
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.generate, NO_OUTPUT[first], answer("Hello", " you"), stream=streams)
        with restarted(client, rank_0):
            status, found, _ = asked.result()
    assert status == 200 and rank_0.calls[0] == rank_0.calls[1] and len(rank_0.calls) == 2
    if streams:
        assert texts_of(found) == ["Hello", " you", ""] and found.endswith("data: [DONE]\n\n")
    else:
        assert found["choices"][0]["text"] == "Hello you" and found["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("path, last", [("/v1/messages", "message_stop"), ("/v1/responses", "response.completed")])
def test_other_apis_begin_a_stream_with_the_first_token(client, rank_0, path, last):
    """Until then a request is computed again: its first event says nothing that a second start would change."""
    text = json.dumps([NO_OUTPUT["progress"], answer("Hello", " you")])
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 9} if "messages" in path else {"input": text}
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.request, "POST", path, body | {"stream": True})
        with restarted(client, rank_0):
            status, found, _ = asked.result()
    events = named_events_of(found)
    assert (status, len(rank_0.calls), events[-1]["type"]) == (200, 2, last)
    deltas = [event["delta"] for event in events if event["type"].endswith("delta") and "delta" in event]
    assert [delta.get("text") if isinstance(delta, dict) else delta for delta in deltas][:2] == ["Hello", " you"]
    assert [event["type"] in ("message_start", "response.created") for event in events].count(True) == 1


def test_an_answer_that_is_not_streamed_is_computed_again_from_its_beginning(client, rank_0):
    with ThreadPoolExecutor(1) as threads:
        half = [*said(ADMITTED, Output(content="He")), "die"]
        asked = threads.submit(client.generate, half, answer("Hello"))
        with restarted(client, rank_0):
            status, found, _ = asked.result()
    assert (status, found["choices"][0]["text"]) == (200, "Hello")


@pytest.mark.parametrize("first, status", [("nothing", 503), ("progress", 200)])
def test_the_second_attempt_is_the_last(client, rank_0, first, status):
    """When the second start fails, too, it is an error: of a stream that has begun an event."""
    with ThreadPoolExecutor(1) as threads:
        again = [*NO_OUTPUT[first][:-1], "hold", "die"]
        asked = threads.submit(client.generate, NO_OUTPUT[first], again, stream=True)
        with restarted(client, rank_0) as second:
            second.go.set()
            assert wait_for(lambda: not second.temporary.exists())
            client.server.failed("rank 0 failed first; it was the last of 1 restarts", None)
            found, body, headers = asked.result()
    assert found == status and headers["Retry-After"] is None and len(rank_0.calls) == 2
    error = body if status == 503 else events_of(body)[-1]
    assert message(error) == "the server has failed: rank 0 failed first; it was the last of 1 restarts"


@pytest.mark.parametrize("end", [["send_half", "die"], ["fail", *said(FAILED)]])
def test_a_stream_with_output_ends_with_the_reason_of_the_launcher(client, rank_0, end):
    with ThreadPoolExecutor(1) as threads:
        begun = [*said(ADMITTED, Output(content="He")), *end]
        asked = threads.submit(client.generate, begun, answer("Hello"), stream=True)
        assert not wait_for(asked.done, 0.3)  # until the launcher has said why
        client.server.failed(REASON, 1.0)
        status, text, _ = asked.result()
    first, error = events_of(text)
    assert (status, first["choices"][0]["text"], message(error)) == (200, "He", EXPLAINED)
    assert error["error"]["type"] == "server_error"


def test_a_request_that_fails_alone_is_not_computed_again(client, rank_0):
    status, body, _ = client.generate([])
    assert status == 502 and message(body) == "rank 0 has closed the connection before the end of the answer"
    assert client.health()[0] == 200 and len(rank_0.calls) == 1
    status, body, _ = client.generate(said(LATE), answer("x"))
    assert (status, message(body)) == (504, LATE.message) and len(rank_0.calls) == 2


def test_hosts_that_lose_each_other_for_a_moment(client, rank_0):
    """Nothing has died: the launcher says nothing, and rank 0 is the same when it is back."""
    if not client.is_elsewhere:
        return
    rank_0.tcp.close()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.generate, answer("Hello"))
        assert wait_for(lambda: client.health()[0] == 503)
        status, body, headers = client.generate(answer("x"))
        assert (status, message(body)) == (503, "rank 0 does not answer") and int(headers["Retry-After"]) >= 1
        rank_0.tcp = TcpSocket(rank_0.temporary / SOCKET, rank_0.tcp.address[1])
        assert wait_for(lambda: client.health()[0] == 200)
        status, found, _ = asked.result()
    assert (status, found["choices"][0]["text"]) == (200, "Hello") and len(rank_0.calls) == 1


def test_a_request_waits_for_its_time_and_not_longer():
    with launcher_server(request_timeout=0.5) as client, started(client):
        status, body, _ = client.generate(["die"])
    assert (status, message(body)) == (504, "the request has taken too long")


def test_requests_that_wait_are_told_of_the_end():
    with ThreadPoolExecutor(1) as threads:
        with launcher_server() as client, started(client) as rank_0:
            asked = threads.submit(client.generate, ["die"])
            assert wait_for(lambda: not rank_0.temporary.exists())
        status, body, _ = asked.result()
    assert (status, message(body)) == (503, "the server stops")


def test_a_client_that_leaves_while_it_waits_is_not_computed_again(client, rank_0):
    with client.connect() as connection:
        connection.sendall(client.raw(["die"], answer("x")))
        assert wait_for(lambda: not rank_0.temporary.exists())
    assert wait_for(lambda: client.server.connections == 0)  # the server has noticed
    client.server.failed(REASON, 0.5)
    with started(client, rank_0):
        assert client.generate(answer("y"))[0] == 200
    assert len(rank_0.calls) == 2


def test_tokens_are_asked_for_again_after_an_outage(client, rank_0):
    rank_0.tokenizer_dies = True
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.request, "POST", "/tokenize", {"prompt": "abc"})
        with restarted(client, rank_0):
            status, found, _ = asked.result()
    assert (status, found["tokens"]) == (200, [97, 98, 99])


def test_health_is_answered_while_rank_0_is_busy(client, rank_0):
    rank_0.is_busy.set()
    try:
        begun = time.monotonic()
        assert client.health()[0] == 200
        assert time.monotonic() - begun < 20  # ends at once, or after rank 0's 30 seconds
    finally:
        rank_0.is_busy.clear()
        rank_0.go.set()


def test_an_event_may_be_longer_than_what_is_read_ahead(client, rank_0):
    large = "x" * 1_000_000
    status, found, _ = client.generate(said(ADMITTED, Output(content=large), FINISHED))
    assert status == 200 and found["choices"][0]["text"] == large
