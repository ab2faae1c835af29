"""The findings of a probe with a peer: what each end of a cable has received, and what follows for both."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import checked, flag, list_of, number, object_of, plain_text

from .probe import PeerProbe

__all__ = ["Course", "Finding", "pack_findings", "unpack_findings"]

_MAX_FINDINGS = 1024  # a rank has at most 255 peers, and 4 links to each
_MAX_TEXT = 255
_SILENCE = "nothing arrives"


@dataclass(frozen=True)
class Finding:
    """The finding of one end about messages of one size, as ``mlxdist_peer_finding`` of mlxdist.h has it."""

    arrives: bool = checked(flag)
    receives: int = checked(number(0, 2**31 - 1))
    empty: bool = checked(flag)
    lengths: bool = checked(flag)
    packets: bool = checked(flag)
    failed: str = checked(plain_text(_MAX_TEXT))
    longer: str = checked(plain_text(_MAX_TEXT))


def pack_findings(findings: Sequence[Finding]) -> bytes:
    return json.dumps([vars(finding) for finding in findings]).encode()


def unpack_findings(data: bytes) -> tuple[Finding, ...]:
    """The findings that :func:`pack_findings` has packed. Raises InvalidArgument: these bytes are not from there."""
    try:
        return list_of(object_of(Finding), _MAX_FINDINGS)("findings", parse_json(data))
    except ValueError as error:
        raise InvalidArgument(
            f"a rank has sent malformed findings of a probe: {error}; install the same mlxdist on all hosts"
        ) from None


@dataclass
class Course:
    """The course of a probe: what both ends have found about each size that was tried, the largest first."""

    sizes: list[int] = field(default_factory=list)
    findings: list[tuple[Finding, Finding]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether messages of the last size arrive, both ways."""
        return bool(self.findings) and all(end.arrives for end in self.findings[-1])

    def add(self, size: int, ends: tuple[Finding, Finding]) -> None:
        """Adds what the ends have found about messages of ``size`` bytes. One that is over takes nothing more."""
        if not self.is_over:
            self.sizes.append(size)
            self.findings.append(ends)

    def result(self) -> PeerProbe:
        """The result of a course that is over. Where the ends differ, the worse finding counts for both."""
        *before, last = self.findings
        packets = bool(before) and all(end.packets for end in last)
        return PeerProbe(
            self.sizes[-1],
            receives=min(end.receives for end in last),
            larger=_telling(end.failed for end in before[-1]) if before else "",
            packets=packets,
            longer="" if packets else _telling(end.longer for end in last),
            empty=all(end.empty for end in self.findings[0]),
            lengths=all(end.lengths for end in last),
        )


def _telling(texts: Iterable[str]) -> str:
    """The text that says most: an end that has received nothing does not know why."""
    return min(filter(None, texts), key=lambda text: text == _SILENCE, default="")
