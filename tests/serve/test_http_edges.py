"""Edges of HTTP: requests before a client closes its side, names of loopback, the log of an answer that fails."""

import contextlib
import json
import socket
import sys

import pytest
from rank_zero import ADMITTED, answer, events_of, launcher_server, read_all, said, started
from waiting import wait_for

from mlxdist.base.errors import InvalidArgument
from mlxdist.cli.serve import _http_options, serve
from mlxdist.serve.api import parse
from mlxdist.serve.http_options import HttpOptions
from mlxdist.serve.http_server import HttpServer
from mlxdist.serve.listener import listen
from mlxdist.serve.protocol import Failed, Output
from mlxdist.serve.rank_zero import RankZero


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_requests_before_a_client_closes_its_side_are_answered(client, rank_0, version):
    """The second one is in the server's buffer while the first one is computed."""
    with client.connect() as connection:
        first, last = client.raw(["hold", *answer("one")]), client.raw(answer("two"), version=version)
        connection.sendall(first + last)
        connection.shutdown(socket.SHUT_WR)
        assert rank_0.holding.acquire(timeout=30)
        rank_0.go.set()
        found = read_all(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 2 and found.index(b'"one"') < found.index(b'"two"')


@pytest.mark.parametrize("name, status", [("evil.page", 403), ("127.1", 200), ("localhost", 200)])
def test_names_of_a_loopback_that_has_another_name(name, status):
    """Where it listens is what matters, and not what --host calls that: some systems give their own name 127.0.1.1."""
    with launcher_server(host="127.1") as client, started(client):
        assert client.request("GET", "/v1/models", Host=name)[0] == status


@pytest.mark.parametrize("scheme, status", [("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401)])
def test_the_name_of_a_scheme_of_keys_has_no_case(scheme, status):
    with launcher_server(api_key="a-long-key") as client, started(client):
        assert client.request("GET", "/v1/models", Authorization=f"{scheme} a-long-key")[0] == status


def test_a_key_without_its_certificate_is_no_plain_http():
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        with pytest.raises(InvalidArgument, match="needs its certificate"):
            HttpServer(listener, HttpOptions(ssl_keyfile="key.pem"), RankZero())


@pytest.mark.parametrize("text", ["http://a.page,http://b.page:8080", " http://a.page/ , http://b.page:8080/,"])
def test_origins_as_people_type_them(text):
    given = {each.name: each.default for each in serve.params} | {"allowed_origins": text}
    assert _http_options(given, "").allowed_origins == ("http://a.page", "http://b.page:8080")


def test_the_log_has_the_tokens_of_an_answer_that_has_not_finished(capfd, client, rank_0):
    failed = Failed(message="the request has taken too long", status=504)
    events = said(ADMITTED, Output(content="ab", completion_tokens=7), failed)
    assert events_of(client.generate(events, stream=True)[1])[-1]["error"]["message"] == failed.message
    lines = []
    assert wait_for(lambda: lines.extend(capfd.readouterr().err.splitlines()) or any(": timeout" in x for x in lines))
    assert any("200, 3 (1 cached) + 7 tokens, " in line for line in lines)


def test_others_have_their_turns_while_a_large_body_is_checked(client):
    """Its hundred thousand messages take seconds: the loop runs callbacks in them."""
    loop, seen, ended = client.server.loop, [], False

    def look():
        frames = list(sys._current_frames().values())
        while frames:
            frame = frames.pop()
            if frame.f_code is parse.__code__:
                seen.append(frame)
            elif frame.f_back is not None:
                frames.append(frame.f_back)
        if not (ended or seen):
            loop.call_later(0.001, look)

    loop.call_soon_threadsafe(look)
    messages = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}] * 25}
    status, found, _ = client.request("POST", "/v1/chat/completions", json.dumps(messages).encode())
    ended = True
    assert status == 503, found  # after the check: there is no rank 0
    assert seen
