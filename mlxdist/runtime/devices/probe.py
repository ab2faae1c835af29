"""The results of probes: what a device takes, as native/transport/probe.c finds by trying; and what it does with
messages, as native/transport/peer_probe.c finds with a peer."""

import errno
from dataclasses import dataclass

from mlxdist.base.validation import checked, flag, number, plain_text

__all__ = ["MESSAGE_SIZES", "MOST", "PeerProbe", "Probe"]

# The most that is tried, from mlxdist.h: a result that is equal to it means that many or more.
MOST = {"queue_pairs": 16, "receives": 8191, "inline_bytes": 256, "regions": 128, "region_bytes": 32 << 20}
# Bytes of the messages that are tried with a peer, from the largest one on; the transport can do with the smallest.
MESSAGE_SIZES = (131072, 65536, 16384, 8192, 4096)
_MAX_COUNT = 2**31 - 1
_MAX_TEXT = 255
_FLAGS = {
    (True, True): "LOCAL_WRITE, with and without remote access",
    (True, False): "LOCAL_WRITE alone",
    (False, True): "LOCAL_WRITE with remote access",
    (False, False): "none",
}


@dataclass(frozen=True)
class Probe:
    """The result of a probe.

    Attributes:
        error: why there is none; the rest is known only where it is empty.
        uc, rc: whether queue pairs of the unreliable and of the reliable connection can be made.
        queue_pairs: how many, at one time.
        queue_pair_errno: why there was no further one; 0 where the provider does not say.
        receives: how many one queue pair has room for.
        inline_bytes: how many a send may carry in its work request.
        region_local, region_remote: whether a memory region takes LOCAL_WRITE alone, and with REMOTE_READ and
            REMOTE_WRITE; likewise a queue pair.
        regions: how many, at one time.
        region_bytes: how large one may be.
        kept: how many objects the device did not take back.
        microseconds: how long the probe took.
    """

    error: str = checked(plain_text(_MAX_TEXT), "")
    uc: bool = checked(flag, False)
    rc: bool = checked(flag, False)
    queue_pairs: int = checked(number(0, MOST["queue_pairs"]), 0)
    queue_pair_errno: int = checked(number(0, _MAX_COUNT), 0)
    receives: int = checked(number(0, MOST["receives"]), 0)
    inline_bytes: int = checked(number(0, MOST["inline_bytes"]), 0)
    region_local: bool = checked(flag, False)
    region_remote: bool = checked(flag, False)
    queue_pair_local: bool = checked(flag, False)
    queue_pair_remote: bool = checked(flag, False)
    regions: int = checked(number(0, MOST["regions"]), 0)
    region_bytes: int = checked(number(0, MOST["region_bytes"]), 0)
    kept: int = checked(number(0, _MAX_COUNT), 0)
    microseconds: int = checked(number(0, _MAX_COUNT), 0)

    def in_words(self) -> dict[str, str]:
        """The result for people: what was tried, and what was found."""
        if self.error:
            return {"error": self.error}
        queue_pairs = self._many("queue_pairs")
        if self.queue_pair_errno:
            queue_pairs += f", then {errno.errorcode.get(self.queue_pair_errno, self.queue_pair_errno)}"
        words = {
            "connections": ", ".join(name for name, there in (("UC", self.uc), ("RC", self.rc)) if there) or "none",
            "queue pairs": queue_pairs,
            "receives of a queue pair": self._many("receives"),
            "inline bytes": self._many("inline_bytes"),
            "access flags of a region": _FLAGS[self.region_local, self.region_remote],
            "access flags of a queue pair": _FLAGS[self.queue_pair_local, self.queue_pair_remote],
            "regions": self._many("regions"),
            "bytes of a region": self._many("region_bytes"),
        }
        return words | ({"not taken back": f"{self.kept} objects"} if self.kept else {})

    def _many(self, name: str) -> str:
        count = getattr(self, name)
        return f"{count} or more" if count == MOST[name] else str(count)


@dataclass(frozen=True)
class PeerProbe:
    """The result of a probe with a peer.

    Attributes:
        largest: bytes of the largest message that arrives in a receive of its size, both ways.
        receives: how many receives of that size were posted at one time.
        larger: what the next larger message fails with; empty where none was tried.
        packets: whether a message that is longer than its receive goes on in the next one.
        longer: what such a message fails with; empty where it does not, or was not tried.
        empty: whether a message without content arrives.
        lengths: whether completions have the length of what has arrived (byte_len).
    """

    largest: int = checked(number(MESSAGE_SIZES[-1], MESSAGE_SIZES[0]))
    receives: int = checked(number(0, _MAX_COUNT), 0)
    larger: str = checked(plain_text(_MAX_TEXT), "")
    packets: bool = checked(flag, False)
    longer: str = checked(plain_text(_MAX_TEXT), "")
    empty: bool = checked(flag, False)
    lengths: bool = checked(flag, False)

    def in_words(self) -> dict[str, str]:
        """The result for people: what was tried, and what was found."""
        larger = f"; larger: {self.larger}" if self.larger else " or more"
        words = {
            "bytes of a message": f"{self.largest}{larger}",
            "receives of that size": f"{self.receives} or more",
            "an empty message": "arrives" if self.empty else "is lost",
            "length in a completion": "right" if self.lengths else "wrong",
        }
        if not (self.packets or self.longer):
            return words
        return words | {"a message longer than its receive": self.longer or "goes on in the next one"}
