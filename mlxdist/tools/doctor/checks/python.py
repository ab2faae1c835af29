"""mlxdist can be imported on each host, and what it depends on is the same everywhere."""

from __future__ import annotations

from mlxdist.version import __version__

from ..cluster import Cluster
from ..findings import Finding, difference, fail, odd_ones, ok, warn
from .reachable import is_about_python

__all__ = ["check_python", "check_versions"]

# Without the same of these a job does not start, or its ranks compute different things.
_STRICT = ("mlxdist", "MLX")
_SLOW_IMPORT = 20.0
_SHOWN = ("Python", "MLX", "mlx_lm", "mlxdist", "system")
_INSTALL = {"MLX": "mlx", "mlx_lm": "mlx-lm", "NumPy": "numpy"}


def check_python(cluster: Cluster) -> list[Finding]:
    found: list[Finding] = []
    for name, trouble in cluster.troubles.get("who", {}).items():
        if is_about_python(trouble.text):
            text = trouble.text.removeprefix(f"{name} does not answer: ").partition("; ")[0]
            remedy = "install mlxdist there (make setup), or name the Python that has it: --python"
            found.append(fail(name, text, remedy))
    for name, trouble in cluster.troubles.get("facts", {}).items():
        if trouble.connected:
            found.append(fail(name, trouble.text, "install the same mlxdist there: make setup"))
    for name, facts in cluster.each("facts"):
        imported = facts["import"]
        if imported["error"]:
            found.append(fail(name, f"mlxdist and MLX: {imported['error']}", "build it there again: make setup"))
        elif imported["seconds"] > _SLOW_IMPORT:
            what = f"importing mlxdist and MLX takes {imported['seconds']:.0f} s"
            found.append(warn(name, what, "install Python and mlxdist on a disk of that host: make setup"))
        else:
            found.append(ok(name, "mlxdist and MLX are imported"))
    return found


def check_versions(cluster: Cluster) -> list[Finding]:
    """Of hosts that have the same mlxdist all is compared; of another one nothing else is asked."""
    versions = {}
    for name, who in cluster.each("who"):  # of any version
        told = who if isinstance(who, dict) else {}
        versions[name] = {"mlxdist": str(told.get("mlxdist", "unknown")), "Python": str(told.get("python", "unknown"))}
    known = set()
    for name, facts in cluster.each("facts"):
        versions[name] |= facts["versions"]
        known.add(name)
    if not versions:
        return []
    found, odd = [], set()
    for what in dict.fromkeys(what for told in versions.values() for what in told):
        asked = versions if what in ("mlxdist", "Python") else known
        values = {name: told.get(what, "not installed") for name, told in versions.items() if name in asked}
        if what == "mlxdist":  # what counts is that of the launcher
            others, usual = [name for name, value in values.items() if value != __version__], __version__
        else:
            others = odd_ones(values)
            usual = next((value for name, value in values.items() if name not in others), "")
        if others:
            odd |= set(others)
            make = fail if what in _STRICT else warn
            elsewhere = "here" if what == "mlxdist" else "elsewhere"
            text = f"{what} is {' and '.join(dict.fromkeys(values[name] for name in others))}, {elsewhere} {usual}"
            found.append(make(others, text, _remedy(what, usual), [difference(what, values)]))
    same = next(iter(versions.values()))
    good = [name for name in versions if name not in odd]
    text = ", ".join(f"{what} {same[what]}" for what in _SHOWN if what in same)
    return [*found, *([ok(good, text)] if good and not found else [])]


def _remedy(what: str, usual: str) -> str:
    if what in _INSTALL:
        missing = f"there: pip uninstall {_INSTALL[what]}; or install it everywhere"
        return missing if usual == "not installed" else f"there: pip install {_INSTALL[what]}=={usual}"
    if what == "mlxdist":
        return f"install mlxdist {usual} there: git checkout of that version, make setup"
    if what == "Python":
        return f"there: make setup PYTHON=... with Python {usual}; or name one that is there: --python"
    return f"bring them to the same ({usual}): softwareupdate --list, apt list --upgradable; or --exclude them"
