"""Results of a check: a verdict on some hosts, its reason, and the command that fixes a problem."""

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = [
    "Difference",
    "Finding",
    "Result",
    "Verdict",
    "difference",
    "fail",
    "note",
    "ok",
    "outliers",
    "skip",
    "warn",
    "way",
]


class Verdict(enum.StrEnum):
    OK = "ok"
    NOTE = "note"  # good to know; nothing to do
    WARN = "warn"  # the job runs, but slower than it could, or not for long
    FAIL = "fail"  # the job would not run, or with wrong results
    SKIP = "skip"  # could not be looked at, and why


@dataclass(frozen=True)
class Difference:
    """Something that should be equal everywhere: its values, and the hosts that have them."""

    what: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Finding:
    """A result. ``hosts``: its hosts, none for all together. ``is_way``: the result is about the way between two."""

    verdict: Verdict
    hosts: tuple[str, ...]
    what: str
    remedy: str = ""
    differences: tuple[Difference, ...] = ()
    is_way: bool = False

    def __post_init__(self) -> None:
        if self.verdict in (Verdict.WARN, Verdict.FAIL) and not self.remedy:
            raise ValueError(f"{self.what}: there is no remedy")


@dataclass(frozen=True)
class Result:
    """All findings of one check."""

    check: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the findings; ok without any."""
        order = (Verdict.FAIL, Verdict.WARN, Verdict.NOTE, Verdict.OK, Verdict.SKIP)
        return next((v for v in order if any(f.verdict is v for f in self.findings)), Verdict.OK)


def _maker(verdict: Verdict) -> Callable[..., Finding]:
    def make(
        hosts: str | Sequence[str], what: str, remedy: str = "", differences: Sequence[Difference] = ()
    ) -> Finding:
        names = (hosts,) if isinstance(hosts, str) else tuple(hosts)
        return Finding(verdict, names, what, remedy, tuple(differences))

    return make


ok, note, warn, fail, skip = map(_maker, Verdict)


def way(finding: Finding) -> Finding:
    """A finding about the way from its first host to its second, either of which may be the cause."""
    return replace(finding, is_way=True)


def difference(what: str, values: Mapping[str, str]) -> Difference:
    """Hosts by their values, the most common value first. ``values``: the value of each host."""
    found: dict[str, list[str]] = {}
    for host, value in values.items():
        found.setdefault(value, []).append(host)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return Difference(what, tuple((value, tuple(hosts)) for value, hosts in ordered))


def outliers(values: Mapping[str, str]) -> list[str]:
    """The hosts whose value is not the most common one; if two are equally common, the first host's counts as usual."""
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: counts[value], default=None)  # of equal ones the first that was counted
    return [host for host, value in values.items() if value != usual]
