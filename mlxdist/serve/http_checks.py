"""Checks every request before its body is read, and prints its line in the access log.

Web pages that the user of this machine opens can send requests to it. Pages of other origins are refused, and so are
those whose name was rebound to this machine's address by their DNS server: they are of the same origin then. The
server's own page is of an origin whose name is this machine's.
"""

import asyncio
import hmac
import ipaddress
import re
import secrets
import socket
import traceback
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .http_options import HttpOptions
from .listener import MAX_BODY
from .log import RequestRecord, say
from .metrics import HttpMetrics
from .page import PAGE_PATHS
from .refusal import Refusal

__all__ = ["AfterCors", "BeforeCors", "record_of", "refused"]

_ANTHROPIC = "/v1/messages"  # paths that begin so have errors of Anthropic's form
_OVERLOADED = 529  # Anthropic's status in place of 503
_UNLOGGED = PAGE_PATHS | {"/health", "/metrics", "/cluster"}  # programs and the page ask every few seconds


def record_of(scope: Scope) -> RequestRecord:
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


def refused(refusal: Refusal, path: str, body: dict[str, Any] | None = None) -> JSONResponse:
    """The response of a refusal, by default with the error in the format of the API that has the path."""
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    headers |= {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    if path.startswith(_ANTHROPIC):
        status = _OVERLOADED if refusal.status == 503 else refusal.status
        return JSONResponse(refusal.anthropic_error, status, headers)
    return JSONResponse(body or refusal.error, refusal.status, headers)


class BeforeCors:
    """Gives a request its id and its line in the log, and refuses hosts and origins that are not allowed.

    Args:
        app: the application behind CORSMiddleware, which adds headers for origins that are allowed.
        metrics: counts the answers.
        is_loopback: whether the server listens on loopback.
    """

    def __init__(self, app: ASGIApp, options: HttpOptions, metrics: HttpMetrics, is_loopback: bool) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._checks_hosts = bool(options.allowed_hosts) or is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if re.fullmatch("[!-~]{1,128}", given) else secrets.token_hex(8)
        scope["path"] = _path(scope["path"])
        record = RequestRecord(name, scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            elif message.get("body"):
                record.has_byte()
            await send(message)

        try:
            self._check(headers)
            await self._app(scope, receive, send_noted)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, send_noted)
        finally:
            self._metrics.answered(record.path, record.status or 499)
            if self._options.access_log and scope["path"] not in _UNLOGGED:
                record.print(self._options.log_format)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host")
        if self._checks_hosts and host is not None and not self._is_own(host):
            raise Refusal(f"{host!r:.80} is not a name of this server; --allowed-hosts names those that are", 403)
        origin, allowed = headers.get("origin"), self._options.allowed_origins
        if origin is not None and not {"*", origin} & set(allowed) and not self._is_page(origin, host or ""):
            raise Refusal("web pages of this origin may not use the model; --allowed-origins names those that may", 403)

    def _is_page(self, origin: str, host: str) -> bool:
        """Whether an Origin is that of the server's own page. The name has to be one that no DNS server gives away."""
        if not self._options.page or origin.partition("://")[2].lower() != host.lower():
            return False
        return self._is_own(host) or host.partition(":")[0].lower() in _own_names()

    def _is_own(self, host: str) -> bool:
        """Whether a Host is a name of this server. An IP address is, as no DNS server gives it another meaning."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        own = ("localhost", self._options.host, *self._options.allowed_hosts)
        return name in map(str.lower, own) or _is_address(name)


class AfterCors:
    """Refuses what is too long or has no key, before the body is read, and answers with what the application raises."""

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._app = app
        self._public = {"/health"} | (PAGE_PATHS if options.page else set())
        self._key = f"Bearer {options.api_key}".encode() if options.api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        try:
            self._check(scope)
            await self._app(scope, receive, send)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, send)
        except ClientDisconnect:
            record.outcome = "cancelled"
        except asyncio.CancelledError:  # the server ends
            await _refuse(Refusal("the server stops", 503), scope, receive, send)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            say(f"request {record.id} has failed at {place.filename}:{place.lineno}: {type(error).__name__}: {error}")
            await _refuse(Refusal("the server has failed at this request", 500), scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")  # of HTTP's syntax
        if len(length) > 18 or int(length) > MAX_BODY:
            raise Refusal(f"the body must have at most {MAX_BODY} bytes", 413)
        if not self._key or scope["path"] in self._public or scope["method"] == "OPTIONS":
            return
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # the second is Anthropic's
        # Not by ==, whose duration depends on how many of the first characters are right.
        scheme, _, key = given.partition(" ")
        if not hmac.compare_digest(f"{scheme.capitalize()} {key}".encode("latin-1"), self._key):
            raise Refusal(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY or x-api-key: KEY", 401
            )


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with a refusal, unless the answer has begun: then the connection ends, which shows it is not complete."""
    record = record_of(scope)
    record.fail(refusal)
    if not record.status:
        await refused(refusal, scope["path"])(scope, receive, send)


def _own_names() -> set[str]:
    """The names under which other machines of the network open the page."""
    name = socket.gethostname().lower()
    first = name.partition(".")[0]
    return {name, first, f"{first}.local"}


def _path(path: str) -> str:
    """The path of a request without the slashes at its end, and of an absolute URL, which HTTP allows there."""
    if path.startswith(("http://", "https://")):
        path = "/" + path.partition("//")[2].partition("/")[2]
    return path.rstrip("/") or "/"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
