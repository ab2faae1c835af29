"""The difference between records: of the hosts of a job, or of several jobs."""

import hashlib
import os
import re
import shlex
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mlxdist.base import tables
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import Check, flag, list_of, map_of, number, object_of, or_null, printable, read_bounded

from .host import MAX_DIFF_BYTES, MAX_NAMES, MAX_TEXT

__all__ = ["OF_HOST", "SCHEMA", "Difference", "Record", "differences", "read_records", "table"]

SCHEMA = 1
MAX_RECORD_BYTES = 64 << 20
MAX_RECORDS = 4096

Record = dict[str, Any]


def _text(most: int) -> Check:
    """A check for text that is kept as it is, and shown with `printable`."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or len(value) > most:
            raise ValueError(f"{name} is no text of at most {most} characters")
        return value

    return check


_SHORT, _TEXTS = _text(MAX_TEXT), map_of(_text(MAX_TEXT), MAX_NAMES)
_GIT = {
    "root": _SHORT,
    "commit": _SHORT,
    "branch": _SHORT,
    "status": list_of(_SHORT, MAX_NAMES),
    "diff": _text(2 * MAX_DIFF_BYTES),  # a placeholder may be longer than what it stands for
    "diff_is_complete": flag,
}
_OF_HOST = {
    "host": _SHORT,
    "versions": _TEXTS,
    "python": _SHORT,
    "packages": _TEXTS,
    "hardware": _TEXTS,
    "environment": _TEXTS,
    "git": or_null(object_of(_GIT)),
}
OF_HOST = object_of(_OF_HOST)
_JOB = {"command": list_of(_text(1 << 20), 1 << 16), "directory": _SHORT, "ranks": number(1, MAX_RANKS)}
_RECORD = object_of({"schema": number(SCHEMA, SCHEMA), **_OF_HOST, "job": object_of(_JOB)})

# Variables of a session, which say where the user sits and not what the ranks do.
_OF_SESSION = re.compile(
    "SSH_(CLIENT|CONNECTION|TTY|AUTH_SOCK)|XDG_SESSION_.*|XDG_(VTNR|SEAT)|DBUS_SESSION_BUS_ADDRESS|INVOCATION_ID"
    "|JOURNAL_STREAM|PWD|OLDPWD|SHLVL|_|HOSTNAME|MAIL|LS_COLORS|LINES|COLUMNS|DISPLAY|WINDOWID|WAYLAND_DISPLAY"
    "|TERM(_SESSION_ID|_PROGRAM.*)?|COLORTERM|SECURITYSESSIONID|TMPDIR|SLURM(D_NODENAME|_NODEID|_PROCID|_LOCALID)"
)
_NOT_THERE = "not there"
_MAX_SHOWN = 60  # characters of a value
_MAX_NAMED = 4  # records in a line


@dataclass(frozen=True)
class Difference:
    """A name whose values differ, and by value the labels of the records that have it."""

    what: str
    values: Mapping[str, Sequence[str]]


def read_records(paths: Sequence[Path]) -> dict[str, Record]:
    """The records in files and directories, by label: the name of the host, and what is different in their paths.

    Raises:
        InvalidArgument: a file is no record, or there are fewer than two records.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not 2 <= len(files) <= MAX_RECORDS:
        raise InvalidArgument(f"there are {len(files)} records to compare; name 2 to {MAX_RECORDS}, or directories")
    common = os.path.commonpath([file.resolve().parent for file in files])
    return {_label(file, common): _read(file) for file in files}


def differences(records: Mapping[str, Record]) -> list[Difference]:
    """Finds what the records do not have alike, in the order of a record; secrets and variables of a session aside."""
    facts = {label: _facts(record) for label, record in records.items()}
    found = []
    for what in dict.fromkeys(name for each in facts.values() for name in each):
        values: dict[str, list[str]] = {}
        for label, each in facts.items():
            values.setdefault(each.get(what, _NOT_THERE), []).append(label)
        if len(values) > 1:
            found.append(Difference(what, values))
    return found


def table(found: Sequence[Difference], most: int | None = None) -> str:
    """The differences as a table; at most ``most`` of them, and how many more there are."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("what", "value", "hosts"):
        shown.add_column(name, overflow="fold")
    for difference in found[:most]:
        for number_of, (value, labels) in enumerate(difference.values.items()):
            shown.add_row(
                Text(printable(difference.what) if number_of == 0 else ""), Text(_shown(value)), Text(_named(labels))
            )
    notes = [f"{len(found) - most} more differ"] if most is not None and len(found) > most else []
    return tables.text(shown, notes)


def _label(file: Path, common: str) -> str:
    path = file.resolve().relative_to(common)
    return printable(os.path.join(*path.parts[:-1], urllib.parse.unquote(path.stem)))


def _read(file: Path) -> Record:
    try:
        record: Record = _RECORD(str(file), parse_json(read_bounded(file, MAX_RECORD_BYTES)))
    except ValueError as error:
        raise InvalidArgument(f"{file} is no record of `mlxdist launch --record`: {error}") from None
    return record


def _facts(record: Record) -> dict[str, str]:
    """The parts of a record that are compared, as text by name."""
    git, job = record["git"], record["job"]
    packages = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in record["packages"].items()}
    variables = {name: v for name, v in record["environment"].items() if not _OF_SESSION.fullmatch(name)}
    facts = dict(record["versions"]) | {"path of Python": record["python"]} | record["hardware"]
    facts |= {"command": shlex.join(job["command"]), "directory": job["directory"], "ranks": str(job["ranks"])}
    if git is not None:
        facts |= {f"git {name}": git[name] for name in ("commit", "branch", "diff")}
        facts |= {"git status": "\n".join(git["status"])}
    return facts | _prefixed("package ", packages) | _prefixed("variable ", variables)


def _prefixed(prefix: str, values: Mapping[str, str]) -> dict[str, str]:
    return {prefix + name: value for name, value in values.items()}


def _shown(value: str) -> str:
    if "\n" not in value and len(value) <= _MAX_SHOWN:
        return printable(value) or "empty"
    digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:8]
    if "\n" in value:
        return f"{len(value.splitlines())} lines, SHA-256 {digest}"
    return f"{printable(value[:_MAX_SHOWN])}... SHA-256 {digest}"


def _named(labels: Iterable[str]) -> str:
    first, *others = labels
    named = [first, *others[: _MAX_NAMED - 1]]
    left = len(others) + 1 - len(named)
    return ", ".join(named) + (f" and {left} more" if left else "")
