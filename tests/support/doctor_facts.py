"""Facts that `mlxdist doctor` might collect from hosts, where all is well unless a test changes that."""

from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.tools.doctor.cluster import CheckOptions, Cluster
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
        "gpus": [],
        "load": 0.5,
        "memory": {"total": 64 * GIB, "available": 50 * GIB, "wired_limit": None},
        "disks": [{"use": "temporary files", "path": "/tmp", "total": 100 * GIB, "free": 50 * GIB}],
        "power": {"systemd": {"masked": True, "idle": ""}},
        "jobs": {"running": [], "stale": [], "orphans": [], "domains": None, "shared_memory": []},
    }
    return usual | changes


def cluster(of=facts(), names=NAMES, options=CheckOptions(), hosts=None, **last) -> Cluster:
    """Hosts with the same facts, but for those of the last one. ``last``: its responses to other requests."""
    all_facts = {name: facts() for name in names}
    all_facts[names[-1]] = of
    versions = {name: found["versions"] for name, found in all_facts.items()}
    who = {name: {"mlxdist": found["mlxdist"], "python": found["Python"]} for name, found in versions.items()}
    responses = {"facts": all_facts, "who": who} | {step: {names[-1]: response} for step, response in last.items()}
    return Cluster(tuple(hosts or map(Host, names)), options, responses)
