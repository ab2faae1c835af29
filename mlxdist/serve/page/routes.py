"""The routes of the page, with the headers that forbid all that it does not do."""

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

__all__ = ["PAGE_PATHS", "page_routes"]

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PATH_OF = {"page.html": "/"} | {
    name: f"/page/{name}"
    for name in ("page.css", "page.js", "server.js", "chat.js", "markdown.js", "cluster.js", "icon.svg")
}
_SETTINGS = "/page/settings"
PAGE_PATHS = frozenset((*_PATH_OF.values(), _SETTINGS))
# Scripts, styles and requests of this server alone. A string is never made into markup or code, so that text of a model
# that reached such a place would be an error.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # of browsers without frame-ancestors
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes(has_key: bool, has_chat: bool) -> list[Route]:
    """The routes of the page.

    Args:
        has_key: whether the server has a key, for which the page asks.
        has_chat: whether there is a model to chat with, beside the cluster.
    """
    directory = Path(__file__).parent
    routes = []
    for name, path in _PATH_OF.items():
        kind = _KINDS[Path(name).suffix]
        routes.append(Route(path, partial(_file, (directory / name).read_bytes(), kind)))
    return [*routes, Route(_SETTINGS, partial(_settings, {"has_key": has_key, "has_chat": has_chat}))]


async def _file(content: bytes, kind: str, request: Request) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)


async def _settings(settings: dict[str, bool], request: Request) -> Response:
    return JSONResponse(settings, headers=_HEADERS)
