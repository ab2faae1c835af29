"""Replaces credentials, and text that identifies a person or a machine, by placeholders: equal values by equal ones.

A report is public. Secrets, serial numbers, hardware UUIDs and GUIDs, MAC addresses, public IP addresses, names
of users and hosts and home directories are replaced; private and link-local IPv4 addresses stay, since they
distinguish cables.
"""

import getpass
import ipaddress
import itertools
import os
import pwd
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from mlxdist.base.credentials import FORMS, PRIVATE_NAME, PRIVATE_VARIABLE, SHORTEST_SECRET, after_options

__all__ = ["Redactor"]

# Names that identify no person or host, and words that occur all over a report.
_COMMON = frozenset(
    (
        "root", "admin", "user", "users", "ubuntu", "debian", "runner", "build", "mac", "macs", "imac", "macbook",
        "studio", "mini", "localhost", "local", "node", "host", "mlx", "mlxdist", "python", "python3", "rank", "ranks",
        "soft", "server", "default", "test", "tests", "unknown", "shared", "guest", "nobody", "mac-studio", "mac-mini",
        "mac-pro", "macbook-pro", "macbook-air",
    )
)  # fmt: skip

_HEX = "[0-9A-Fa-f]"
_QUOTED = r"\"[^\"\n]*\"|'[^'\n]*'"
# The patterns are tried in this order at every place: longer and more distinct ones come first. Words have a bounded
# length, or begin where a word begins, so that no text needs more time than one pass.
_PATTERNS = {
    "placeholder": r"<(?:removed|[a-z0-9-]+-\d+)>",
    **FORMS,
    "field": rf"(?P<field_name>(?<![\w-])[\w-]{{0,40}}?(?i:{PRIVATE_NAME.pattern})[\w-]{{0,40}}(?: [Nn]umber)?"
    r"(?: \([\w ]{1,20}\))?[\"']?\s?[:=]\s?)"
    rf"(?P<field_value>{_QUOTED}|(?:(?i:basic|bearer|digest|token) )?[^\s\"',;}}\]]+)",
    "option": rf"(?P<option_name>(?<![\w-])--?[\w-]{{0,40}}?(?i:{PRIVATE_NAME.pattern})[\w-]{{0,40}}[\"']?,?\s+)"
    rf"(?P<option_value>{_QUOTED}|(?!-|\d{{1,{SHORTEST_SECRET - 1}}}(?![\w.-]))[^\s\"',;]+)",
    "variable": rf"(?P<variable_name>\b[A-Z][A-Z0-9_]*(?:KEY|AUTH|PASS)=)(?P<variable_value>{_QUOTED}|[^\s\"',;]+)",
    "uuid": rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b",
    "guid": rf"(?<![\w:])(?:{_HEX}{{4}}(?::{_HEX}{{4}}){{3}}|{_HEX}{{2}}(?::{_HEX}{{2}}){{7}}|0x{_HEX}{{16}})(?![\w:])"
    rf"|(?<![\w.-]){_HEX}{{16}}(?!\w|[.-]\w)",  # the second as ibv_devices prints it
    # MAC addresses have 6 bytes in Ethernet, and 20 in IPoIB.
    "mac": rf"(?<![\w:.-]){_HEX}{{1,2}}(?:(?::{_HEX}{{1,2}}){{14}})?(?::{_HEX}{{1,2}}){{5}}(?![\w:])"
    rf"|(?<![\w-]){_HEX}{{2}}(?:-{_HEX}{{2}}){{5}}(?![\w-])",
    "hex": rf"\b{_HEX}{{32,}}\b",
    "directory": r"/var/folders/[^/\s\"']+/[^/\s\"']+",
    "home": r"/(?:Users|home)/(?P<user>[^/\s\"':,;<>()]+)",
    "account": r"(?<![\w.+-])(?P<login>[A-Za-z0-9_.+-]{1,64})@(?P<at>[A-Za-z0-9_][A-Za-z0-9_.-]*)",
    # Hosts in messages of ssh, which prints the HostName of ssh_config; and Bonjour names.
    "named": r"(?:connect to host|resolve hostname|[Cc]onnection (?:closed|reset|timed out) by)\s+"
    r"(?P<host>(?!<|(?:peer|remote|foreign|authenticating|invalid|UNKNOWN)\b)[^\s\"']+?)(?=:?(?:[\s\"']|$))",
    "bonjour": r"(?<![\w.-])(?!threading\.)[A-Za-z0-9][\w-]{0,62}\.local\b(?![\w.-]*[\w(])",
    "ipv4": r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)",
    "ipv6": rf"(?<![\w:.])(?:{_HEX}{{0,4}}:){{2,7}}(?:\d{{1,3}}(?:\.\d{{1,3}}){{3}}|{_HEX}{{0,4}})(?![\w:])",
}


class Redactor:
    """Replaces equal values by equal placeholders. Call `learn` first, with everything that is printed."""

    def __init__(
        self, hosts: Iterable[str] = (), users: Iterable[str] = (), environ: Mapping[str, str] = os.environ
    ) -> None:
        """Learns names to replace: ``hosts``, ``users``, this machine's own, and those in ``environ``."""
        self._numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)  # of placeholders, by kind and value
        self._literals: dict[str, str] = {}  # what is replaced as it stands: its kind
        self._domains: defaultdict[str, set[str]] = defaultdict(set)  # of hosts, by the first label of their names
        for name, value in environ.items():
            if PRIVATE_VARIABLE.search(name) and len(value) >= SHORTEST_SECRET and not os.path.exists(value):
                self._literals[value] = "secret"
        self._homes = {os.path.expanduser("~"), environ.get("HOME", "")} - {"", "/", "~"}
        for name in (*users, *_user_names(environ)):
            self._learn_user(name)
        self.learn_hosts([*hosts, socket.gethostname()])

    def learn(self, value: Any) -> None:
        """Collects names of users in paths, and values of private keys, to replace them wherever they occur."""
        for key, text in _texts(value):
            if key and PRIVATE_NAME.search(key) and len(text) >= SHORTEST_SECRET:
                self._literals.setdefault(text, "removed")
            for found in re.finditer(_PATTERNS["home"], text):
                self._learn_user(found["user"])
            given = [m[f"{kind}_value"] for kind in ("field", "option") for m in re.finditer(_PATTERNS[kind], text)]
            for secret in (value.strip("\"'") for value in given):
                if len(secret) >= SHORTEST_SECRET and any(map(str.isdigit, secret)):
                    self._literals.setdefault(secret, "removed")
        self._compile()

    def learn_hosts(self, names: Iterable[str]) -> None:
        for name in names:
            self._learn_host(name)
        self._compile()

    def text(self, text: str) -> str:
        return self._pattern.sub(self._replace, text)

    def value(self, value: Any) -> Any:
        """Redacts a value of JSON, including keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return [self._field(option, inner) for option, inner in after_options(value)]
        return value

    def _mapping(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, inner in value.items():
            shown = self.text(str(key))
            # Two keys may be equal once they are redacted: a number keeps both entries.
            names = itertools.chain([shown], (f"{shown} ({number})" for number in itertools.count(2)))
            found[next(name for name in names if name not in found)] = self._field(str(key), inner)
        return found

    def _field(self, key: str, value: Any) -> Any:
        is_private = PRIVATE_NAME.search(key) and isinstance(value, str | int) and not isinstance(value, bool)
        return "<removed>" if is_private and value else self.value(value)

    def _learn_host(self, name: str) -> None:
        name = name.rpartition("@")[2].rstrip(".")
        label, _, domain = _plain(name).partition(".")
        if domain not in ("", "local"):
            self._domains[label].add(domain)
        for known in (name, name.partition(".")[0]):
            if len(known) > 1 and known.lower() not in _COMMON and not _is_address(known) and not known.isdecimal():
                self._literals.setdefault(known, "host")

    def _learn_user(self, name: str) -> None:
        if len(name) > 1 and name.lower() not in _COMMON and not name.startswith("<"):
            self._literals.setdefault(name, "user")

    def _compile(self) -> None:
        known = sorted((*self._literals, *self._homes), key=len, reverse=True)
        self._known = {literal.lower(): self._literals.get(literal, "home") for literal in known}
        literals = [_literal(literal, self._known[literal.lower()]) for literal in known]
        patterns = [f"(?P<{name}>{pattern})" for name, pattern in _PATTERNS.items()]
        literal = [f"(?P<literal>{'|'.join(literals)})"] if literals else []
        self._pattern = re.compile("|".join([patterns[0], *literal, *patterns[1:]]))

    def _replace(self, found: re.Match[str]) -> str:
        kind, text = found.lastgroup, found[0]
        if kind == "placeholder":
            return text
        if kind == "literal":
            return self._replace_literal(text)
        if kind in ("field", "option", "variable"):
            value = found[f"{kind}_value"]
            return found[f"{kind}_name"] + ("<removed>" if value.strip("\"'") else value)
        if kind == "home":
            return text[: -len(found["user"])] + self._user(found["user"])
        if kind == "account":
            return f"{self._user(found['login'])}@{self._host(found['at'])}"
        if kind == "named":
            return text[: -len(found["host"])] + self._host(found["host"])
        if kind == "bonjour":
            return self._host(text)
        if kind == "directory":
            return f"/var/folders/{self._placeholder('directory', text)}"
        if kind in ("ipv4", "ipv6"):
            return self._address(text)
        return self._placeholder(kind if kind in ("uuid", "guid", "mac") else "secret", text.lower())

    def _replace_literal(self, text: str) -> str:
        kind = self._known.get(text.lower()) or "host"  # a name that is written with other signs between its words
        if kind in ("home", "removed"):
            return "~" if kind == "home" else "<removed>"
        return self._placeholder(kind, self._host_key(text) if kind == "host" else _plain(text))

    def _user(self, name: str) -> str:
        return name if name.lower() in _COMMON else self._placeholder("user", _plain(name))

    def _host(self, name: str) -> str:
        if _is_address(name) or name in _COMMON:
            return self.text(name)
        return self._placeholder("host", self._host_key(name))

    def _host_key(self, name: str) -> str:
        """A key that is equal for all names of a host: without a domain, if the first label has only one."""
        plain = _plain(name)
        label = plain.partition(".")[0]
        return label if len(self._domains[label]) < 2 else plain

    def _address(self, text: str) -> str:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:  # a time of day, a version
            return text
        address = getattr(address, "ipv4_mapped", None) or address
        is_known = address.is_loopback or address.is_unspecified or address.is_multicast
        if (
            is_known
            or (address.version == 4 and (address.is_link_local or _is_private(address)))
            or text.startswith(("255.", "0."))
        ):  # masks
            return text
        # A link-local or private IPv6 address may contain the MAC address, so it is replaced, unlike one of IPv4.
        scope = "-link-local" if address.is_link_local else "-private" if _is_private(address) else ""
        return self._placeholder(f"ipv{address.version}{scope}", str(address))

    def _placeholder(self, kind: str, value: str) -> str:
        numbers = self._numbers[kind]
        return f"<{kind}-{numbers.setdefault(value, len(numbers) + 1)}>"


def _literal(literal: str, kind: str) -> str:
    if kind in ("secret", "removed"):
        return re.escape(literal)
    if kind == "home":
        return rf"{re.escape(literal)}(?![\w-])"
    # The computer name "Ann's Mac Studio" becomes Anns-Mac-Studio on the network: both spellings match.
    words = "[-_ ]".join("['’]?".join(map(re.escape, word)) for word in literal.split("-"))
    return rf"(?<![A-Za-z0-9])(?i:{words})(?![A-Za-z0-9])"


def _plain(name: str) -> str:
    return re.sub("['’]", "", re.sub("[-_ ]", "-", name)).lower()


def _texts(value: Any, key: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, str(name))
    elif isinstance(value, list | tuple):
        for option, inner in after_options(value):
            yield from _texts(inner, option or key)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_private(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    networks = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16") if address.version == 4 else ("fc00::/7",)
    return any(address in ipaddress.ip_network(network) for network in networks)


def _user_names(environ: Mapping[str, str]) -> list[str]:
    """Names of the user who runs this: the account, and the words of the full name."""
    names = [environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    try:
        names.append(getpass.getuser())
        full = pwd.getpwuid(os.getuid()).pw_gecos.partition(",")[0]
    except (KeyError, OSError):  # a user whom the system has no name for
        full = ""
    return [*names, full, *(word for word in full.split() if len(word) > 2)]
