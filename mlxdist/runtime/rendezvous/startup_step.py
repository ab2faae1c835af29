"""A step of the start: it succeeds on all ranks, or fails on all of them with the error of one."""

from collections.abc import Callable

from mlxdist.base.errors import Error, by_name, located

from .protocol import MAX_TEXT, pack_json, unpack_json
from .rendezvous import Rendezvous

__all__ = ["StepFailed", "take_step"]

_DONE, _FAILED = b"\0", b"\1"


class StepFailed(Exception):
    """The lowest rank on which a step failed, and why: the same on all ranks."""

    def __init__(self, rank: int, host: str, providers: str, kind: type[Error], cause: str) -> None:
        super().__init__(f"{providers.removesuffix('+soft')} failed on rank {rank} on {host}: {cause}")
        self.rank = rank
        self.host = host
        self.providers = providers
        self.kind = kind
        self.cause = cause

    def error(self, text: str | None = None) -> Error:
        """The error for the program. ``text`` stands in it instead of the cause alone."""
        what = text or self.cause
        return self.kind(located(f"rank {self.rank} on {self.host} could not connect: {what}", self.rank, self.host))


def take_step(rendezvous: Rendezvous, what: str, host: str, providers: str, action: Callable[[], bytes]) -> list[bytes]:
    """Runs ``action`` and returns its results on all ranks, in rank order. Costs one all_gather, however it ends.

    ``host``, ``providers``: of this rank, for the others' texts.

    Raises:
        StepFailed: ``action`` raised an Error, on this rank or another one.
        Error: of the rendezvous, as ``all_gather`` raises them.
    """
    try:
        outcome = _DONE + action()
    except Error as error:
        fields = {"error": type(error).__name__, "text": str(error)[:MAX_TEXT], "host": host, "providers": providers}
        outcome = _FAILED + pack_json(**fields)
    outcomes = rendezvous.all_gather(outcome, what)
    for rank, outcome in enumerate(outcomes):
        if outcome.startswith(_FAILED):
            fields = unpack_json(outcome[1:], error=str, text=str, host=str, providers=str)
            raise StepFailed(rank, fields["host"], fields["providers"], by_name(fields["error"]), fields["text"])
    return [outcome[1:] for outcome in outcomes]
