"""A request that is not served: for rank 0 and for the application of HTTP, which has no mlx-lm."""

import re
from typing import Any

__all__ = ["Refusal", "sentence"]

# Of errors that have no other: in a stream the client has no status.
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    429: "rate_limit_exceeded",
    500: "internal_error",
    502: "bad_gateway",
    503: "service_unavailable",
    504: "timeout",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Refusal(Exception):
    """A request that is not served, or not to its end. Its text goes to the client.

    Attributes:
        status: the status of HTTP.
        retry_after: seconds, or None.
        param: the field of the request that is wrong; None if it is none or all of them.
        code: OpenAI's name of the error, such as "context_length_exceeded"; None if it has none.
    """

    def __init__(
        self,
        text: str,
        status: int = 400,
        retry_after: int | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.retry_after, self.param = status, retry_after, param
        self.code = code or _CODES.get(status)

    @property
    def error(self) -> dict[str, Any]:
        """The body of the error, in the format of OpenAI's API."""
        # OpenAI's own name of a limit of requests is that of the limit; compatible servers have this one.
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = kind if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_error(self) -> dict[str, Any]:
        """The body of the error, in the format of Anthropic's API."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


def sentence(error: Exception) -> str:
    """The text of another library's exception for clients, without paths and lines of this machine."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return re.sub(r"(/[\w.-]+){2,}", "...", text)[:500]
