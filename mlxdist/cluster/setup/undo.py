"""Runs steps, and records their inverses in a file next to the hostfile: names and values, no commands."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxdist.base.atomic_file import atomic_write
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import fields_of, list_of, number, plain_text, read_bounded

from ..hostfile.hosts import check_name
from ..ssh.ssh import LOST, TOO_LATE, SshConfig, run
from .steps import Step

__all__ = ["UndoFile", "run_steps"]

_VERSION = 1
_MAX_BYTES, _MAX_STEPS, _MAX_VALUES, _MAX_TEXT = 1 << 20, 10_000, 8, 1000
_SECONDS = 60.0

# root needs no sudo, and a host whose only user is root may not have it.
_AS_ROOT = ["sh", "-c", 'test "$(id -u)" = 0 && exec "$@"; exec sudo -n "$@"', "sh"]


class UndoFile:
    """The inverses of the steps that were run, in the order of those steps, as a file has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = self._read() if path.exists() else []

    @classmethod
    def beside(cls, hostfile: str) -> "UndoFile":
        """The file next to ``hostfile``: rmlx-hosts.undo.json for rmlx-hosts.json."""
        return cls(Path(hostfile).with_suffix(".undo.json"))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self._write()

    def remove(self, step: Step) -> None:
        self.steps.reverse()  # the latest of several that are alike
        self.steps.remove(step)
        self.steps.reverse()
        self._write()

    def _read(self) -> list[Step]:
        try:
            return list(fields_of(_FIELDS, parse_json(read_bounded(self.path, _MAX_BYTES)))["steps"])
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
    steps: Sequence[Step], ssh_config: SshConfig, say: Callable[[str], None], file: UndoFile, undoing: bool = False
) -> list[str]:
    """Prints and runs each step, in order, and keeps ``file`` up to date. Returns the texts of errors.

    After a failure nothing more is run on that host. ``undoing``: the steps are those of ``file``, which do not depend
    on each other, so only a host that is lost is skipped.
    """
    errors: list[str] = []
    skipped: set[str] = set()
    for step in steps:
        if step.host in skipped:
            continue
        say(f"{step.host}: {step}")
        inverse = None if undoing else step.undone
        if inverse:
            file.add(inverse)  # before the step is run, for it may be interrupted
        result = run(step.host, [*_AS_ROOT, *step.words], ssh_config, seconds=_SECONDS)
        # networksetup prints errors to standard output, and its exit status may be 0 all the same.
        words = result.last_words or " ".join(result.output.strip().splitlines()[-2:]) or result.failure
        if result.status == 0 and "** Error" not in result.output:
            if undoing:
                file.remove(step)
            continue
        is_lost = result.status in (LOST, TOO_LATE)  # the step may have had its effect all the same
        if inverse and not is_lost:
            file.remove(inverse)
        if is_lost or not undoing:
            skipped.add(step.host)
        errors.append(f"{step.host}: `{step}` failed: {words}")
    return errors
