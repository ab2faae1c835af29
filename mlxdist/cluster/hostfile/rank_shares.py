"""The relative speeds of the ranks of a hostfile, from the measurements of their hosts by `mlxdist calibrate`."""

from typing import Any

from mlxdist.base import tuning_file
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import map_of

from .hosts import MAX_MEASURED, Host, Hostfile, Measured, check_measurement

__all__ = ["MEASUREMENTS", "check_hosts", "measured_hosts", "speeds", "rank_share_variables"]

MAX_HOSTS = 10_000
# The purposes of a plan: the measurement that decides, and the variable that ranks read. A decoded token reads every
# weight once for one row of products, so memory limits the speed; prompts and training have many rows.
MEASUREMENTS = {
    "memory": ("memory_gbps", "MLXDIST_RANK_SHARES_MEMORY"),
    "compute": ("tflops", "MLXDIST_RANK_SHARES_COMPUTE"),
}


def measured_hosts() -> dict[str, Measured]:
    """The measurements in the tuning file, by host name. Raises InvalidArgument: the file is malformed."""
    path = tuning_file.find(tuning_file.setting())
    return {} if path is None else tuning_file.read_section(path, "hosts", check_hosts, {})


def check_hosts(value: Any) -> dict[str, Measured]:
    """Checks measurements of hosts and returns them by name. Raises ValueError: ``value`` has anything else."""
    hosts = map_of(lambda _, host: host, MAX_HOSTS)("hosts", value)
    return {name: _measured(name, host) for name, host in hosts.items()}


def _measured(name: str, value: Any) -> Measured:
    if not isinstance(value, dict) or not {"tflops", "memory_gbps"} <= value.keys() <= MAX_MEASURED.keys():
        raise ValueError(f"{name} must be an object with {', '.join(MAX_MEASURED)}, not {value!r:.80}")
    for key, number in value.items():
        if problem := check_measurement(key, number):
            raise ValueError(f"{name}: {problem}")
    return Measured(**{key: float(number) for key, number in value.items()})


def speeds(hostfile: Hostfile, by: str = "memory", measured: dict[str, Measured] | None = None) -> list[float]:
    """The speed of each rank relative to the slowest one (1.0): its host's measurement over the number of ranks there.

    Args:
        by: "memory" for decoding, "compute" for prompts and training.
        measured: the measurements of each host, by name; by default those in the tuning file.

    Raises:
        InvalidArgument: no such measurement, or not all hosts are measured.
    """
    if by not in MEASUREMENTS:
        raise InvalidArgument(f"rank shares are measured by {' or by '.join(map(repr, MEASUREMENTS))}, not {by!r:.80}")
    measured = measured_hosts() if measured is None else measured
    missing = [host.name for host in hostfile.hosts if host.name not in measured]
    if missing:
        raise InvalidArgument(
            f"{hostfile.source}: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} is not measured; run "
            f"`mlxdist calibrate --hostfile {hostfile.source}`"
        )
    each = _of_each_rank(hostfile, measured, MEASUREMENTS[by][0])
    # Rounded like the variable, from which ranks read what commands compute here: both must make the same plan.
    return [round(speed / min(each), 4) for speed in each]


def rank_share_variables(hostfile: Hostfile) -> dict[str, str]:
    """The variables with the speeds of all ranks; none where a host is not measured."""
    measured = measured_hosts()
    if any(host.name not in measured for host in hostfile.hosts):
        return {}
    found = {name: speeds(hostfile, by, measured) for by, (_, name) in MEASUREMENTS.items()}
    found["MLXDIST_MEMORY_GBPS"] = _of_each_rank(hostfile, measured, "memory_gbps")
    return {name: ",".join(f"{speed:.4f}" for speed in each) for name, each in found.items()}


def _of_each_rank(hostfile: Hostfile, measured: dict[str, Measured], name: str) -> list[float]:
    """The measurement of its host over the number of ranks there, for each rank."""
    each = [getattr(measured[host.name], name) / _ranks_on(host, hostfile) for host in hostfile.hosts]
    return [speed for host, speed in zip(hostfile.hosts, each) for _ in range(host.slots)]


def _ranks_on(host: Host, hostfile: Hostfile) -> int:
    """The number of ranks on a host, over all its entries: JSON may repeat a host for each of its ranks."""
    return sum(other.slots for other in hostfile.hosts if other.name == host.name)
