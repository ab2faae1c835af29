"""Hostfile parsing: detects the format and reports all errors at once, each with its line."""

import os
import re
from collections.abc import Callable
from dataclasses import replace

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import Located, parse_located
from mlxdist.base.validation import nearest, read_bounded

from . import device_map
from .hosts import BACKENDS, Host, Hostfile, Problems, check_address, check_denied, check_name, check_variable

__all__ = ["parse", "read"]

_MAX_BYTES = 16 << 20
_MAX_PORT = 65535
_TOP = ("backend", "envs", "hosts")
_ENTRY = ("ssh", "ips", "rdma", "slots", "denied")
# A bracket alone does not mean JSON: a line such as [fe80::1]:2 begins with one, too.
_JSON = re.compile(r"\s*(\{|\[\s*([\[{\]\"]|(null|true|false)\b))")
# A scalar is JSON and no name of a host: the error has to be about JSON.
_SCALAR = re.compile(r"""\s*(null|true|false|-?\d+(\.\d+)?|".*")\s*""", re.DOTALL)
_SLOTS = re.compile(r"(?:max[-_])?slots=(\S+)")
_ADDRESS = re.compile(r"\[?([0-9A-Fa-f.:%\w]+?)\]?:([0-9]{1,5})")


def read(path: str | os.PathLike[str]) -> Hostfile:
    """The hostfile at ``path``; see `parse`. Raises InvalidArgument: it cannot be read, or what `parse` raises."""
    try:
        data = read_bounded(path, _MAX_BYTES)
    except ValueError as error:
        raise InvalidArgument(f"hostfile {os.fspath(path)!r:.200}: {error}") from None
    try:
        return parse(data.decode(), os.fspath(path))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(f"hostfile {path}, line {line}: byte {error.start} is not UTF-8") from None


def parse(text: str, source: str = "hostfile") -> Hostfile:
    """The hostfile in ``text``: JSON as MLX has it, lines of ``host slots=N`` or ``host:N``, or MLX_HOSTFILE's lists.
    Raises InvalidArgument: malformed; each line of the message names the line of the file."""
    text = text.removeprefix("\ufeff")  # editors on Windows begin a file with it
    problems = Problems()
    try:
        is_json = _JSON.match(text) or _SCALAR.fullmatch(text)
        found = _read_json(text, problems) if is_json else _read_lines(text, problems)
    except ValueError as error:
        raise InvalidArgument(f"hostfile {source}, {error}") from None
    if problems.errors:
        lines = problems.lines(problems.errors)
        raise InvalidArgument(f"hostfile {source}, " + f"\nhostfile {source}, ".join(lines))
    hosts, backend, envs, format = found
    return Hostfile(tuple(hosts), backend, tuple(envs), source, format, tuple(problems.lines(problems.warnings)))


_Found = tuple[list[Host], str, list[str], str]


def _read_lines(text: str, problems: Problems) -> _Found:
    hosts = []
    colons = 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            name, slots = _split_slots(words[0])
            colons += slots is not None
            if slots is not None and "@" in name:
                problems.error(number, _which_number(words[0], name, slots))
                slots = "1"
            if slots is None and len(words) == 1:
                slots = "1"
            for word in words[1:]:
                slots = _option(word, slots, number, problems)
            hosts.append(Host(_name(name, number, problems), _count(slots, number, problems), line=number))
    problems.check_hosts(hosts, repeated=False)
    return hosts, "", [], "colon" if colons and colons == len(hosts) else "slots"


def _split_slots(word: str) -> tuple[str, str | None]:
    """Name and number of ``host:N``. More than one colon is an IPv6 address, in brackets where N follows."""
    if word.startswith("["):
        name, _, slots = word[1:].partition("]")
        return name, slots[1:] if slots.startswith(":") else None if not slots else slots
    name, colon, slots = word.partition(":")
    return (word, None) if not colon or ":" in slots else (name, slots)


def _which_number(word: str, name: str, number: str) -> str:
    """The error for ``user@host:N``. MPICH's format has ranks after the colon and no users; N may be ssh's port."""
    return (
        f"{word!r:.80}: is {number:.20} a number of ranks or the port of ssh? For ranks write `{name:.80} "
        f"slots={number:.20}`; for a port write `Port {number:.20}` in ~/.ssh/config, and no number here"
    )


def _option(word: str, slots: str | None, line: int, problems: Problems) -> str | None:
    match = _SLOTS.fullmatch(word)
    if not match:
        problems.error(line, f"{word!r:.80} is not understood; write `host slots=N`, one host to a line")
        return "1"
    if word.startswith("max"):
        return slots or "1"
    if slots is not None:
        problems.error(line, f"{word!r:.80}: the number of slots is there twice")
    return match[1]


def _count(slots: object, line: int, problems: Problems) -> int:
    number = int(slots) if isinstance(slots, str) and slots.isdecimal() and len(slots) < 10 else slots
    if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MAX_RANKS:
        return number
    problems.error(line, f"slots are a number from 1 to {MAX_RANKS}, not {slots!r:.80}")
    return 1


def _name(name: object, line: int, problems: Problems) -> str:
    if wrong := check_name(name):
        problems.error(line, wrong)
    return str(name)


def _read_json(text: str, problems: Problems) -> _Found:
    top = parse_located(text)
    backend, envs, entries = "", [], top
    if isinstance(top.value, dict):
        _warn_of_unknown(top, _TOP, problems)
        backend = _backend(top.value.get("backend"), problems)
        envs = _texts(top.value.get("envs"), '"envs"', check_variable, problems)
        entries = top.value.get("hosts", top)
    if not isinstance(entries.value, list):
        raise ValueError(f'line {entries.line}: "hosts" must be a list of hosts, each {{"ssh": ..., "ips": [...]}}')
    if len(entries.value) > MAX_RANKS:
        raise ValueError(f"line {entries.line}: {len(entries.value)} hosts; at most {MAX_RANKS} are possible")
    if entries.value and all(isinstance(entry.value, list) for entry in entries.value):
        hosts, format = [_ring_entry(entry, problems) for entry in entries.value], "ring"
    else:
        hosts, format = [_entry(entry, problems) for entry in entries.value], "json"
        hosts = _with_devices(hosts, entries.value, problems)
    problems.check_hosts(hosts, repeated=True)
    return hosts, backend, envs, format


def _entry(entry: Located, problems: Problems) -> Host:
    if not isinstance(entry.value, dict):
        problems.error(entry.line, f'a host is an object such as {{"ssh": "name"}}, not {entry.plain()!r:.80}')
        return Host("?", line=entry.line)
    _warn_of_unknown(entry, _ENTRY, problems)
    ssh = entry.value.get("ssh")
    if ssh is None:
        problems.error(entry.line, 'this host has no "ssh": the name or address that ssh connects to')
    name = _name(ssh.plain(), ssh.line, problems) if ssh else "?"
    slots = entry.value.get("slots")
    return Host(
        name,
        _count(slots.plain(), slots.line, problems) if slots else 1,
        tuple(_texts(entry.value.get("ips"), '"ips"', check_address, problems)),
        line=entry.line,
        denied=_denied(entry.value.get("denied"), problems),
    )


def _denied(found: Located | None, problems: Problems) -> str:
    if found is None:
        return ""
    if wrong := check_denied(found.plain()):
        problems.error(found.line, wrong)
    return str(found.plain())


def _ring_entry(entry: Located, problems: Problems) -> Host:
    """The host of one rank, from its addresses ["ip:port", ...] in a hostfile for MLX's ring."""
    ips, ports = [], []
    for item in entry.value:
        match = _ADDRESS.fullmatch(item.value) if isinstance(item.value, str) else None
        wrong = check_address(match[1]) if match else f'{item.plain()!r:.80} is no address such as "10.0.0.1:5000"'
        if match and not wrong and not 1 <= int(match[2]) <= _MAX_PORT:
            wrong = f"{item.plain()!r:.80}: a port is a number from 1 to {_MAX_PORT}"
        if wrong:
            problems.error(item.line, wrong)
        elif match:
            ips.append(match[1])
            ports.append(int(match[2]))
    if not entry.value:
        problems.error(entry.line, "a rank without an address")
    return Host(ips[0] if ips else "?", ips=tuple(ips), line=entry.line, ports=tuple(ports))


def _with_devices(hosts: list[Host], entries: list[Located], problems: Problems) -> list[Host]:
    """The hosts with their rows of the device map, if the file has one."""
    rows = [entry.value.get("rdma") if isinstance(entry.value, dict) else None for entry in entries]
    if problems.errors or not any(row and row.value for row in rows):
        return hosts
    try:
        found = device_map.rows_of([entry.plain() for entry in entries])
    except device_map.MalformedMap as error:
        row = rows[error.row] if error.row is not None else None
        problems.error((row or entries[error.row or 0]).line, f'"rdma": {error}')
        return hosts
    return [replace(host, rdma=row) for host, row in zip(hosts, found)]


def _backend(backend: Located | None, problems: Problems) -> str:
    if backend is None or backend.value == "":
        return ""
    if backend.value not in BACKENDS:
        known = f"{', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
        problems.error(backend.line, f'"backend" is {backend.plain()!r:.80}; it can be {known}')
    return str(backend.value)


def _texts(found: Located | None, what: str, check: Callable[[object], str | None], problems: Problems) -> list[str]:
    if found is None:
        return []
    if not isinstance(found.value, list):
        problems.error(found.line, f"{what} must be a list of texts, not {found.plain()!r:.80}")
        return []
    for item in found.value:
        if wrong := check(item.plain()):
            problems.error(item.line, f"{what}: {wrong}")
    return [str(item.plain()) for item in found.value]


def _warn_of_unknown(found: Located, known: tuple[str, ...], problems: Problems) -> None:
    for name, value in found.value.items():
        if name not in known:
            close = nearest(name, known)
            meant = f"; did you mean {close!r}?" if close else f"; known are {', '.join(known)}"
            problems.warn(value.line, f"{name!r:.80} is not known and changes nothing{meant}")
