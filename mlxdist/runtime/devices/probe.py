"""The result of a probe: what a device takes, as native/transport/probe.c finds by trying."""

import errno
from dataclasses import dataclass

from mlxdist.base.validation import checked, flag, number, plain_text

__all__ = ["MOST", "Probe"]

# The most that is tried, from mlxdist.h: a result that is equal to it means that many or more.
MOST = {"queue_pairs": 16, "receives": 8191, "inline_bytes": 256, "regions": 128, "region_bytes": 32 << 20}
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
