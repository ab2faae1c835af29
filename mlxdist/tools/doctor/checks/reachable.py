"""Checks that ssh reaches each host, and that the host is named once, imports mlxdist, and has the others' versions."""

import re
import shlex
from collections.abc import Iterator

from mlxdist.cluster.ssh.ssh import is_this_machine
from mlxdist.version import __version__

from ..cluster import Cluster
from ..findings import Finding, difference, fail, ok, outliers, warn

__all__ = ["check_python", "check_reachable", "check_versions"]

# Texts that ssh prints, and the remedy for each. The first one that the output contains counts.
_REMEDIES = (
    ("Permission denied", "install your key there: ssh-copy-id {name}"),
    ("Host key verification failed", "look at its key and accept it once: ssh {name} true"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "if that is right, forget the old key: ssh-keygen -R {host}"),
    ("Could not resolve", "write its address into ~/.ssh/config (Host {host}, HostName ADDRESS) or the hostfile"),
    ("Connection refused", "start its ssh server: `sudo systemctl enable --now ssh`; on a Mac "
     "`sudo systemsetup -setremotelogin on`"),
    ("No route to host", "look whether it is on and in this network: ping {host}"),
    ("timed out", "look whether it is on and in this network: ping {host}"),
    ("does not respond", "look whether it is on and not hung: ssh -o BatchMode=yes {name} uptime"),
    ("No such file", "give the command that reaches hosts: --ssh"),
)  # fmt: skip
# With different versions of these, a job does not start, or its ranks compute different results.
_STRICT = ("mlxdist", "MLX")
_SLOW_IMPORT = 20.0
_SHOWN = ("Python", "MLX", "mlx_lm", "mlxdist", "system")
_PACKAGES = {"MLX": "mlx", "mlx_lm": "mlx-lm", "NumPy": "numpy"}


def check_reachable(cluster: Cluster) -> Iterator[Finding]:
    for name in cluster.names:
        lost = [errors[name] for errors in cluster.errors.values() if name in errors and not errors[name].connected]
        if not lost or _is_about_python(lost[0].text):
            yield ok(name, "this machine" if is_this_machine(name) else "by ssh, without a password")
            continue
        text = lost[0].text.partition("; try: ")[0]
        advice = next((advice for words, advice in _REMEDIES if words in text), "try: ssh -o BatchMode=yes {name} true")
        host = name.rpartition("@")[2]
        yield fail(name, text, advice.format(name=shlex.quote(name), host=shlex.quote(host)))
    yield from _twice(cluster)


def _twice(cluster: Cluster) -> Iterator[Finding]:
    """Finds two names of one machine: jobs under both names would share files. Ranks compare the same identity."""
    first: dict[str, str] = {}
    for name, facts in cluster.each("facts"):
        other = first.setdefault(facts["identity"] or name, name)
        if other != name:
            remedy = f"write it once, with its ranks: {other} slots=2; two Macs: sudo scutil --set HostName NEW_NAME"
            yield fail(name, f"this is the same machine as {other}, or a Mac of the same name", remedy)


def check_python(cluster: Cluster) -> Iterator[Finding]:
    for name, error in cluster.errors.get("who", {}).items():
        if _is_about_python(error.text):
            text = error.text.removeprefix(f"{name} does not respond: ").partition("; ")[0]
            remedy = "install mlxdist there (make setup), or name the Python that has it: --python"
            yield fail(name, text, remedy)
    for name, error in cluster.errors.get("facts", {}).items():
        if error.connected:
            yield fail(name, error.text, "install the same mlxdist there: make setup")
    for name, facts in cluster.each("facts"):
        imported = facts["import"]
        if imported["error"]:
            yield fail(name, f"mlxdist and MLX: {imported['error']}", "build it there again: make setup")
        elif imported["seconds"] > _SLOW_IMPORT:
            what = f"importing mlxdist and MLX takes {imported['seconds']:.0f} s"
            yield warn(name, what, "install Python and mlxdist on a disk of that host: make setup")
        else:
            yield ok(name, "mlxdist and MLX are imported")


def _is_about_python(text: str) -> bool:
    """Whether ssh reached the host, and only the program to start is missing there."""
    return bool(re.search(r"No module named|--python", text))


def check_versions(cluster: Cluster) -> Iterator[Finding]:
    """Compares all versions between hosts with the same mlxdist; a host with another one reports nothing else."""
    versions = {}
    for name, who in cluster.each("who"):  # of any version
        who = who if isinstance(who, dict) else {}
        versions[name] = {"mlxdist": str(who.get("mlxdist", "unknown")), "Python": str(who.get("python", "unknown"))}
    facts = dict(cluster.each("facts"))
    for name in facts:
        versions[name] |= facts[name]["versions"]
    differing: set[str] = set()
    for what in dict.fromkeys(what for of_host in versions.values() for what in of_host):
        compared = versions if what in ("mlxdist", "Python") else facts
        values = {name: of_host.get(what, "not installed") for name, of_host in versions.items() if name in compared}
        others = outliers(values)
        usual = next((value for name, value in values.items() if name not in others), "")
        if what == "mlxdist":  # what counts is that of the launcher
            others, usual = [name for name, value in values.items() if value != __version__], __version__
        if others:
            differing |= set(others)
            make = fail if what in _STRICT else warn
            elsewhere = "here" if what == "mlxdist" else "elsewhere"
            text = f"{what} is {' and '.join(dict.fromkeys(values[name] for name in others))}, {elsewhere} {usual}"
            yield make(others, text, _install(what, usual), [difference(what, values)])
    if versions and not differing:
        same = next(iter(versions.values()))
        yield ok(list(versions), ", ".join(f"{what} {same[what]}" for what in _SHOWN if what in same))


def _install(what: str, usual: str) -> str:
    if what in _PACKAGES:
        missing = f"there: pip uninstall {_PACKAGES[what]}; or install it everywhere"
        return missing if usual == "not installed" else f"there: pip install {_PACKAGES[what]}=={usual}"
    if what == "mlxdist":
        return f"install mlxdist {usual} there: git checkout of that version, make setup"
    if what == "Python":
        return f"there: make setup PYTHON=... with Python {usual}; or name one that is there: --python"
    return f"bring them to the same ({usual}): softwareupdate --list, apt list --upgradable; or --exclude them"
