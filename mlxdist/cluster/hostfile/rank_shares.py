"""How fast the ranks of a hostfile are beside each other, from what `mlxdist calibrate` has measured."""

from mlxdist.base.errors import InvalidArgument

from .hosts import Host, Hostfile

__all__ = ["MEASUREMENTS", "speeds", "weight_variables"]

# What a plan can be made for: the measurement that decides, and the variable for the ranks. A decoded token reads
# every weight once for one row of products, so memory is what takes time; prompts and training have many rows.
MEASUREMENTS = {
    "memory": ("memory_gbps", "MLXDIST_RANK_SHARES_MEMORY"),
    "compute": ("tflops", "MLXDIST_RANK_SHARES_COMPUTE"),
}


def speeds(hostfile: Hostfile, by: str = "memory") -> list[float]:
    """The speed of each rank relative to the slowest, 1.0: what its host reaches, divided by the ranks there.

    Args:
        by: "memory" for decoding, "compute" for prompts and training.

    Raises:
        InvalidArgument: no such measurement, or not all hosts are measured.
    """
    if by not in MEASUREMENTS:
        raise InvalidArgument(f"weights are measured by {' or by '.join(map(repr, MEASUREMENTS))}, not {by!r:.80}")
    missing = [host.name for host in hostfile.hosts if host.measured is None]
    if missing:
        raise InvalidArgument(
            f"{hostfile.source}: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} is not measured; run "
            f"`mlxdist calibrate --hostfile {hostfile.source} --output {hostfile.source}`"
        )
    name, _ = MEASUREMENTS[by]
    each = [getattr(host.measured, name) / _ranks_on(host, hostfile) for host in hostfile.hosts]
    # Rounded: the ranks read the same number in a variable.
    return [round(speed / min(each), 4) for host, speed in zip(hostfile.hosts, each) for _ in range(host.slots)]


def weight_variables(hostfile: Hostfile) -> dict[str, str]:
    """The variables that tell ranks how fast they all are; none where a host is not measured."""
    if any(host.measured is None for host in hostfile.hosts):
        return {}
    return {name: ",".join(f"{speed:.4f}" for speed in speeds(hostfile, by)) for by, (_, name) in MEASUREMENTS.items()}


def _ranks_on(host: Host, hostfile: Hostfile) -> int:
    """JSON may repeat a host for each of its ranks."""
    return sum(other.slots for other in hostfile.hosts if other.name == host.name)
