"""The options of the HTTP server of `mlxdist serve`."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["HttpOptions"]


@dataclass(frozen=True)
class HttpOptions:
    """The options of the HTTP server of `mlxdist serve`.

    Attributes:
        host, port: the address where it listens; port 0 is a free one.
        api_key: the key that clients send; empty for none.
        allowed_origins: origins of web pages that may use the server; "*" for all.
        allowed_hosts: names of this machine that clients may use, beyond localhost, IP addresses and ``host``, where
            the server listens on loopback. Elsewhere, if there are any, no other name is allowed.
        request_timeout: the maximum duration of a request in seconds, from its arrival.
        ssl_certfile, ssl_keyfile: PEM files of a certificate chain and its key, for TLS; None for plain HTTP.
        ignore_unknown_fields: whether fields that are not served are ignored, instead of a 400.
        normalize_heads: whether parts of system prompts that a client changes with each request, and that say nothing
            to the model, are left out.
        log_format: "json": the access log is an object a line.
        access_log: whether there is one.
        page: whether there is a page, at the path "/".
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str = field(default="", repr=False)
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    request_timeout: float = 600.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ignore_unknown_fields: bool = False
    normalize_heads: bool = True
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    page: bool = True
