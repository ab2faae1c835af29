"""A host does not fall asleep. A Mac is kept awake while a job runs; between jobs ssh has to reach it, too."""

from __future__ import annotations

from ..cluster import Cluster
from ..findings import Finding, note, ok, skip, warn

__all__ = ["check_sleep"]


def check_sleep(cluster: Cluster) -> list[Finding]:
    found = []
    for name, facts in cluster.each("facts"):
        power = facts["power"]
        if "pmset" in power:
            found.append(_mac(name, power["pmset"]))
        elif "systemd" in power:
            found.append(_linux(name, power["systemd"]))
        else:
            found.append(skip(name, "neither pmset nor systemd says when it sleeps"))
    return found


def _mac(name: str, settings: dict[str, int]) -> Finding:
    if "sleep" not in settings:
        return skip(name, "pmset -g does not say when it sleeps")
    minutes = settings["sleep"]
    if minutes and not settings.get("SleepDisabled"):
        what = f"it sleeps after {minutes} min without a user: not while a job runs (caffeinate), but before one"
        return note(name, what, "sudo pmset -a sleep 0 disksleep 0")
    return ok(name, "it does not sleep by itself")


def _linux(name: str, told: dict) -> Finding:
    if not told["masked"] and told["idle"] not in ("", "ignore", "lock"):
        what = f"it does this when nobody uses it: {told['idle']} (IdleAction of systemd-logind)"
        return warn(name, what, "sudo systemctl mask sleep.target suspend.target hibernate.target hybrid-sleep.target")
    return ok(name, "it does not sleep by itself")
