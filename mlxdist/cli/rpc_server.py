"""`mlxdist rpc-server`, which ssh starts on a host, and the table of functions that clients can call there."""

import click

from mlxdist.cluster.ssh.rpc_server import serve

__all__ = ["FUNCTIONS", "STREAMING", "rpc_server"]

FUNCTIONS = {
    "calibrate.machine": "mlxdist.tools.calibrate.measure:machine",
    "calibrate.measure": "mlxdist.tools.calibrate.measure:measure",
    "doctor.allocate": "mlxdist.tools.doctor.facts:allocate",
    "doctor.clock": "mlxdist.tools.doctor.facts:clock",
    "doctor.connect": "mlxdist.tools.doctor.network:connect",
    "doctor.digest": "mlxdist.tools.doctor.files:digest",
    "doctor.facts": "mlxdist.tools.doctor.facts:read",
    "doctor.gpu_sync": "mlxdist.tools.doctor.gpu:synchronization",
    "doctor.health": "mlxdist.tools.doctor.link_health:read",
    "doctor.installation": "mlxdist.tools.doctor.facts:installation",
    "doctor.listen": "mlxdist.tools.doctor.network:listen",
    "doctor.model": "mlxdist.tools.doctor.files:list_model",
    "doctor.program": "mlxdist.tools.doctor.files:program",
    "doctor.rdma": "mlxdist.tools.doctor.facts:devices",
    "observe.respond": "mlxdist.tools.observe.collect:respond",
    "observe.time": "mlxdist.tools.observe.collect:wall_ns",
    "jobs.list": "mlxdist.launch.jobs_on_hosts:list_here",
    "jobs.recorded": "mlxdist.launch.jobs:has_recordings",
    "jobs.stop": "mlxdist.launch.jobs_on_hosts:stop_here",
    "models.list": "mlxdist.tools.models.inventory:list_here",
    "record.read": "mlxdist.tools.record.host:read",
    "who": "mlxdist.cluster.ssh.rpc_server:who",
}
STREAMING = {"launch.agent": "mlxdist.launch.agent:serve"}


@click.command("rpc-server", hidden=True)
def rpc_server() -> None:
    """Serve calls of another host over the standard streams."""
    serve(FUNCTIONS, STREAMING)
