"""A request that is not served: for rank 0 and for the proxy, which has no mlx-lm."""

from typing import Any

__all__ = ["Refusal"]


class Refusal(BaseException):
    """A request that is not served, or not to its end. Its text goes to the client.

    It is no Exception, because mlx-lm's handler answers all exceptions with a status of its own.

    Attributes:
        status: the status of HTTP.
        retry_after: seconds, or None.
    """

    def __init__(self, text: str, status: int = 400, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status, self.retry_after = status, retry_after

    @property
    def error(self) -> dict[str, Any]:
        """The body of the error, in the format of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.status}}
