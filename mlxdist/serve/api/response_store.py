"""The conversations of earlier answers of /v1/responses, which `previous_response_id` names."""

import json
from collections import OrderedDict
from typing import Any

from mlxdist.base.json_reader import parse_json

from ..listener import MAX_BODY
from ..refusal import Refusal

__all__ = ["MAX_STORED", "ResponseStore"]

MAX_STORED = 64 << 20  # bytes of all: a thousand conversations of a coding agent, and 1 % of the smallest Mac's memory


class ResponseStore:
    """Keeps conversations in memory, as JSON, whose size is known. What was not used for the longest goes first.

    Args:
        most: the bytes of all of them.
    """

    def __init__(self, most: int = MAX_STORED) -> None:
        self._most, self._size = most, 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def put(self, name: str, messages: list[dict[str, Any]]) -> None:
        """Keeps a conversation, unless no request could have it: a body is no longer than that either."""
        data = json.dumps(messages, ensure_ascii=False).encode()
        if len(data) > min(self._most, MAX_BODY):
            return
        self._kept[name] = data
        self._size += len(data)
        while self._size > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._size -= len(oldest)

    def get(self, name: str) -> list[dict[str, Any]]:
        """The messages of a conversation. Raises Refusal: it is not there."""
        if name not in self._kept:
            raise Refusal(
                f"there is no response {name[:64]!a}: it was not stored, or later ones have its place, or the server "
                "has started since; send the conversation as input",
                404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end(name)
        messages: list[dict[str, Any]] = parse_json(self._kept[name], repeated=True)
        return messages
