"""The page of `mlxdist serve`: its files and headers, and to whom it is served. A browser is in test_browser.py."""

import json
import re
import socket
from pathlib import Path

from click.testing import CliRunner
from rank_zero import answer, launcher_server, started

import mlxdist.serve
from mlxdist.cli.serve import serve
from mlxdist.serve.page import PAGE_PATHS

KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".html": "text/html"}
FILES = [path for path in (Path(mlxdist.serve.__file__).parent / "page").iterdir() if path.suffix in KINDS]
MARKUP = r"\.(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\son\w+="
ADDRESS = r"(?:https?:|url\(|//)[\w./-]+\.\w+[\w./-]*"


def chat(client, origin, host):
    body = {"messages": [{"role": "user", "content": json.dumps([answer("x")])}]}
    return client.request("POST", "/v1/chat/completions", body, Origin=origin, Host=host)


def test_each_file_is_served_with_headers_that_forbid_what_it_does_not_do(client):
    assert len(FILES) == len(PAGE_PATHS) - 1  # the settings are no file
    for file in FILES:
        path = "/" if file.name == "page.html" else f"/page/{file.name}"
        status, text, headers = client.request("GET", path)
        assert (status, text) == (200, file.read_text()) and headers["Content-Type"].startswith(KINDS[file.suffix])
        policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert client.request("HEAD", path)[:2] == (200, "")
        assert client.request("POST", path, {})[0] == 405


def test_no_file_names_another_place_or_has_code_in_markup():
    for file in FILES:
        text = file.read_text()
        addresses = re.findall(ADDRESS, text.replace("http://www.w3.org/2000/svg", ""))  # the name of SVG's elements
        assert not addresses and not re.search(MARKUP, text), (file.name, addresses)
    html = next(file for file in FILES if file.name == "page.html").read_text()
    assert "style=" not in html and re.findall(r"<script[^>]*>(.*?)</script>", html) == [""]
    named = set(re.findall(r'(?:href|src)="([^"#]+)"', html))
    assert named and named <= PAGE_PATHS


def test_the_page_is_served_without_the_key_and_asks_for_it():
    with launcher_server(api_key="a-long-key") as client, started(client):
        for path in PAGE_PATHS:
            assert client.request("GET", path)[0] == 200
        assert client.request("GET", "/page/settings")[1] == {"has_key": True, "has_chat": True}
        assert client.request("GET", "/v1/models")[0] == client.request("GET", "/page/nothing")[0] == 401


def test_there_may_be_no_page():
    with launcher_server(page=False) as client, started(client):
        assert [client.request("GET", path)[0] for path in PAGE_PATHS] == [404] * len(PAGE_PATHS)
        assert client.request("GET", "/cluster")[0] == 200
        here = f"127.0.0.1:{client.port}"
        assert chat(client, f"http://{here}", here)[0] == 403
    with launcher_server(page=False, api_key="a-long-key") as client:
        assert client.request("GET", "/")[0] == 401


def test_the_page_alone_may_use_the_model(client, rank_0):
    """Requests of its origin, if no DNS server can have given it that name."""
    own = [f"127.0.0.1:{client.port}", f"localhost:{client.port}", f"[::1]:{client.port}"]
    for host in own:
        assert chat(client, f"http://{host}", host)[0] == 200
        for origin in ("http://evil.page", "null", f"http://{host}.evil.page", f"http://127.0.0.1:{client.port + 1}"):
            assert chat(client, origin, host)[0] == 403
    assert chat(client, "http://evil.page", "evil.page")[0] == 403
    assert client.request("GET", "/", Host="evil.page")[0] == 403


def test_a_page_of_another_machine_has_a_name_of_this_one():
    with launcher_server(host="0.0.0.0") as client, started(client):
        name = socket.gethostname()
        for host in (name, f"{name.partition('.')[0]}.local:{client.port}", f"192.0.2.7:{client.port}"):
            assert chat(client, f"http://{host}", host)[0] == 200
        assert chat(client, "http://evil.page", "evil.page")[0] == 403  # its name may lead here
    with launcher_server(host="0.0.0.0", allowed_hosts=("studio.example",)) as client, started(client):
        assert chat(client, "https://studio.example", "studio.example")[0] == 200  # behind a proxy with TLS


def test_the_page_is_an_option_of_the_command():
    shown = CliRunner().invoke(serve, ["--help"]).output
    assert "--page / --no-page" in shown
