"""Each host is reached by ssh without a password, answers every question in time, and is there once."""

from __future__ import annotations

import re
import shlex

from mlxdist.cluster.ssh.ssh import is_this_machine

from ..cluster import Cluster
from ..findings import Finding, fail, ok

__all__ = ["check_reachable", "is_about_python"]

# What ssh says, and what to do. The first that is found in it holds.
_REMEDIES = (
    ("Permission denied", "let it know your key: ssh-copy-id {name}"),
    ("Host key verification failed", "look at its key and accept it once: ssh {name} true"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "if that is right, forget the old key: ssh-keygen -R {host}"),
    ("Could not resolve", "write its address into ~/.ssh/config (Host {host}, HostName ADDRESS) or the hostfile"),
    ("Connection refused", "start its ssh server: `sudo systemctl enable --now ssh`; on a Mac "
     "`sudo systemsetup -setremotelogin on`"),
    ("No route to host", "look whether it is on and in this network: ping {host}"),
    ("timed out", "look whether it is on and in this network: ping {host}"),
    ("does not answer", "look whether it is on and not hung: ssh -o BatchMode=yes {name} uptime"),
    ("No such file", "give the command that reaches hosts: --ssh"),
)  # fmt: skip


def check_reachable(cluster: Cluster) -> list[Finding]:
    found = []
    for name in cluster.names:
        lost = [(step, told[name]) for step, told in cluster.troubles.items() if name in told]
        lost = [(step, trouble) for step, trouble in lost if not trouble.connected]
        if not lost or is_about_python(lost[0][1].text):
            found.append(ok(name, "this machine" if is_this_machine(name) else "by ssh, without a password"))
            continue
        text = lost[0][1].text.partition("; try: ")[0]
        advice = next((advice for words, advice in _REMEDIES if words in text), "try: ssh -o BatchMode=yes {name} true")
        host = name.rpartition("@")[2]
        found.append(fail(name, text, advice.format(name=shlex.quote(name), host=shlex.quote(host))))
    return found + _twice(cluster)


def _twice(cluster: Cluster) -> list[Finding]:
    """Two names of one machine: what one keeps for a job is in the way of the other. Ranks tell hosts apart so, too."""
    found, first = [], {}
    for name, facts in cluster.each("facts"):
        other = first.setdefault(facts["identity"] or name, name)
        if other != name:
            remedy = f"write it once, with its ranks: {other} slots=2; two Macs: sudo scutil --set HostName NEW_NAME"
            found.append(fail(name, f"this is the same machine as {other}, or a Mac of the same name", remedy))
    return found


def is_about_python(text: str) -> bool:
    """Whether the host was reached, and only what should have been started there is missing."""
    return bool(re.search(r"No module named|--python", text))
