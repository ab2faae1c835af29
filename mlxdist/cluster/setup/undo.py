"""Runs steps, and records their inverses in a file next to the hostfile: names and values, no commands."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxdist.base.atomic_file import atomic_write
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import fields_of, json_of, list_of, number, plain_text, read_bounded

from ..hostfile.hosts import check_name
from ..ssh.ssh import LOST, TOO_LATE, SshConfig, run
from .steps import Step

__all__ = ["UndoFile", "run_steps"]

_VERSION = 1
_MAX_BYTES, _MAX_STEPS, _MAX_VALUES, _MAX_TEXT = 1 << 20, 10_000, 8, 1000
_SECONDS = 60.0

# A user who is root needs no sudo, and a host that is root's may have none.
_AS_ROOT = ["sh", "-c", 'test "$(id -u)" = 0 && exec "$@"; exec sudo -n "$@"', "sh"]


class UndoFile:
    """Steps that take back what was done, in the order in which it was done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = self._read() if path.exists() else []

    @classmethod
    def beside(cls, hostfile: str) -> "UndoFile":
        """rmlx-hosts.undo.json of rmlx-hosts.json."""
        return cls(Path(hostfile).with_suffix(".undo.json"))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self._write()

    def remove(self, step: Step) -> None:
        self.steps.reverse()  # the latest of several that are alike
        self.steps.remove(step)
        self.steps.reverse()
        self._write()

    def add_undo(self, step: Step) -> None:
        """Remembers what takes ``step`` back: before it is run, for it may be interrupted."""
        if step.undone:
            self.add(step.undone)

    def remove_undo(self, step: Step) -> None:
        """``step`` has failed."""
        if step.undone:
            self.remove(step.undone)

    def _read(self) -> list[Step]:
        try:
            return list(fields_of(_FIELDS, json_of(read_bounded(self.path, _MAX_BYTES), _MAX_BYTES))["steps"])
        except ValueError as error:
            raise InvalidArgument(f"{self.path} is no file that `mlxdist config` wrote: {error}") from None

    def _write(self) -> None:
        rows = ",\n".join(f"    {json.dumps([step.host, step.action, *step.values])}" for step in self.steps)
        try:
            if rows:
                atomic_write(self.path, f'{{\n  "mlxdist undo": {_VERSION},\n  "steps": [\n{rows}\n  ]\n}}\n')
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{self.path}, which remembers what is taken back: {error.strerror}") from None


def _step(name: str, value: object) -> Step:
    host, action, *values = list_of(plain_text(_MAX_TEXT), _MAX_VALUES)(name, value)
    if problem := check_name(host):
        raise ValueError(problem)
    return Step(host, action, tuple(values))


_FIELDS = {"mlxdist undo": number(_VERSION, _VERSION), "steps": list_of(_step, _MAX_STEPS)}


def run_steps(
    steps: Sequence[Step],
    ssh_config: SshConfig,
    say: Callable[[str], None],
    *,
    before: Callable[[Step], None] = lambda step: None,
    failed: Callable[[Step], None] = lambda step: None,
    after: Callable[[Step], None] = lambda step: None,
    go_on: bool = False,
) -> list[str]:
    """One after the other, each shown first. What went wrong; after that nothing more is run on that host.

    ``failed`` is not called where a step may have had its effect all the same: the connection was lost, or the time
    over. ``go_on``: steps do not depend on those before them; only a host that is lost is left alone.
    """
    errors: list[str] = []
    left_alone: set[str] = set()
    for step in steps:
        if step.host in left_alone:
            continue
        say(f"{step.host}: {step}")
        before(step)
        answer = run(step.host, [*_AS_ROOT, *step.words], ssh_config, seconds=_SECONDS)
        # networksetup says that something went wrong, but not always by its exit status, and on standard output.
        words = answer.last_words or " ".join(answer.output.strip().splitlines()[-2:])
        if answer.status == 0 and "** Error" not in answer.output:
            after(step)
            continue
        is_lost = answer.status in (LOST, TOO_LATE)
        if not is_lost:
            failed(step)
        if is_lost or not go_on:
            left_alone.add(step.host)
        errors.append(f"{step.host}: `{step}` failed: {words or f'exit status {answer.status}'}")
    return errors
