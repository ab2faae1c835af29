"""Facts that `mlxdist doctor` might hear from hosts, where all is well unless a test says otherwise."""

from mlxdist.cluster.hostfile import Host
from mlxdist.tools.doctor.cluster import Cluster, Question
from mlxdist.version import __version__

__all__ = ["GIB", "NAMES", "VERSIONS", "cluster", "facts"]

NAMES = ("a", "b", "c")
GIB = 1 << 30

VERSIONS = {"Python": "3.12.1", "MLX": "0.32.4", "mlx_lm": "0.32.2", "mlxdist": __version__, "system": "macOS 26.3"}


def facts(**changes) -> dict:
    usual = {
        "versions": VERSIONS,
        "import": {"error": "", "seconds": 1.0},
        "variables": {},
        "variables_error": "",
        "identity": "",
        "ssh": [],
        "system": "Linux",
        "cores": 8,
        "load": 0.5,
        "memory": {"total": 64 * GIB, "available": 50 * GIB},
        "disks": [{"use": "temporary files", "path": "/tmp", "total": 100 * GIB, "free": 50 * GIB}],
        "power": {"systemd": {"masked": True, "idle": ""}},
        "jobs": {"running": [], "left": [], "orphans": [], "domains": None, "shared_memory": []},
    }
    return usual | changes


def cluster(of=facts(), names=NAMES, question=Question(), hosts=None, **told) -> Cluster:  # noqa: B008
    """Hosts with the same facts, but for those of the last one. ``told``: what it says to other questions."""
    everyone = {name: facts() for name in names}
    everyone[names[-1]] = of
    versions = {name: told["versions"] for name, told in everyone.items()}
    who = {name: {"mlxdist": told["mlxdist"], "python": told["Python"]} for name, told in versions.items()}
    answers = {"facts": everyone, "who": who} | {step: {names[-1]: answer} for step, answer in told.items()}
    return Cluster(tuple(hosts or map(Host, names)), question, answers)
