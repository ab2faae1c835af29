"""Checks whether each end of a cable reaches the other end through that cable."""

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations

from ..facts.collect import HostFacts
from ..ssh.ssh import SshConfig, agent_advice, run
from .addresses import Link
from .ethernet import Choice

__all__ = ["Check", "checks_of_addresses", "checks_of_links", "problem", "verify"]

_TRIES = 5  # an address that was just given takes a moment
_SECONDS = 30.0

# reach INTERFACE ADDRESS; an empty interface means any. Without ping, a refused connection proves that it is reached.
_SCRIPT = """route_to() { case "$(uname -s)" in
  Darwin) route -n get "$1" 2>/dev/null | sed -n 's/^ *interface: //p' ;;
  *) ip route get "$1" 2>/dev/null | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' | head -n 1 ;;
esac </dev/null; }
reach() { if command -v ping >/dev/null; then case "$(uname -s)" in
  Darwin) ping -c 1 -t 2 ${1:+-b "$1"} "$2" ;;
  *) ping -c 1 -W 2 ${1:+-I "$1"} "$2" ;;
  esac </dev/null >/dev/null 2>&1
else
  said=$(LC_ALL=C timeout 2 bash -c "exec 3<>/dev/tcp/$2/9" 2>&1 </dev/null) && return
  case "$said" in *refused*) return 0 ;; *) return 1 ;; esac
fi; }
check() { tries=0
  until reach "$2" "$3"; do
    tries=$((tries + 1))
    test $tries -lt @TRIES@ || { printf '\\n@mlxdist:%s no %s\\n' "$1" "$(route_to "$3")"; return; }
    sleep 1
  done
  printf '\\n@mlxdist:%s yes %s\\n' "$1" "$(route_to "$3")"
}
""".replace("@TRIES@", str(_TRIES))


@dataclass(frozen=True)
class Check:
    """A check that ``host`` reaches ``address``. ``interface``: the way that it must take; empty for any."""

    host: str
    peer: str
    address: str
    interface: str = ""
    bridge: str = ""


def checks_of_links(machines: Sequence[HostFacts], links: Sequence[Link]) -> list[Check]:
    """Checks of both directions of each cable."""
    return [
        Check(
            machines[here].name,
            machines[there].name,
            str(link.address(there).ip),
            link.cable.end(here).interface,
            machines[here].bridge_of(link.cable.end(here).interface),
        )
        for link in links
        for here, there in (link.cable.pair, link.cable.pair[::-1])
    ]


def checks_of_addresses(machines: Sequence[HostFacts], choices: Sequence[Choice | None]) -> list[Check]:
    """Checks that every host reaches every other one."""
    pairs = permutations(zip(machines, choices), 2)
    return [Check(here.name, there.name, str(to.address.ip)) for (here, _), (there, to) in pairs if to is not None]


def verify(checks: Sequence[Check], ssh_config: SshConfig) -> list[str]:
    """Runs the checks. Returns one text for each that failed, with advice; the same text if a host does not respond."""
    hosts = list(dict.fromkeys(check.host for check in checks))

    def check_host(host: str) -> list[str]:
        mine = [check for check in checks if check.host == host]
        lines = [shlex.join(["check", str(i), check.interface, check.address]) for i, check in enumerate(mine)]
        script = f"main() {{\nPATH=$PATH:/usr/sbin:/sbin\n{_SCRIPT}" + " &\n".join(lines) + " &\nwait\n}\nmain\n"
        result = run(host, ["sh", "-s"], ssh_config, input=script, seconds=_SECONDS)
        found = {int(number): (word, route) for number, word, route in _RESULT.findall(result.output)}
        if not found:
            advice = agent_advice(host, result.failure)
            return [f"{host} does not report what it reaches: {result.failure}{advice}"] * len(mine)
        return [text for i, check in enumerate(mine) if (text := problem(check, *found.get(i, ("no", ""))))]

    with ThreadPoolExecutor(max(1, len(hosts))) as threads:
        return [text for texts in threads.map(check_host, hosts) for text in texts]


_RESULT = re.compile(r"^@mlxdist:(\d+) (yes|no) ?(\S*)$", re.MULTILINE)


def problem(check: Check, reached: str, route: str) -> str:
    """The error text of a check, or "". ``reached``: "yes" or "no"; ``route``: the interface that the route uses."""
    by = f" by {check.interface}" if check.interface else ""
    if reached != "yes":
        text = f"{check.host} does not reach {check.address} of {check.peer}{by}"
        if check.bridge:
            return f"{text}: {check.interface} is a member of {check.bridge}; run this again with --without-bridge"
        return f"{text}: look at the cable, at the addresses of both hosts, and at their firewalls"
    if check.interface and route and route != check.interface:
        return (
            f"{check.host} reaches {check.address} of {check.peer} by {route}, not by {check.interface}: another "
            "interface has an address of that subnet; remove it, or choose other subnets with --range"
        )
    return ""
