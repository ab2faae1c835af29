"""The command line of `mlxdist launch`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mlxdist.base.environment import OF_JOB, Environment
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.launch.backends import Backend, choose
from mlxdist.launch.executable import check_command
from mlxdist.launch.local import base_environment, check_fast_synch
from mlxdist.launch.options import LaunchCommand, Options, absolute, launch_options, parse_settings, with_python
from mlxdist.launch.plan import LaunchPlan
from mlxdist.launch.run import StallWatcher, run
from mlxdist.launch.stale_jobs import remove_stale_jobs
from mlxdist.runtime import mpi_shim

if TYPE_CHECKING:
    from pathlib import Path

    from mlxdist.cluster.hostfile.hosts import Hostfile
    from mlxdist.launch.nodes import Nodes

__all__ = ["launch"]

_OF_SCHEDULER = ("SLURM_JOB_END_TIME",)  # mlxdist.train.Control, in rank 0, ends the job before that

_MAX_DIFFERENCES = 20  # between hosts, of --record


@click.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False})
@launch_options
@host_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENTS]...")
def launch(selection: HostSelection, command: tuple[str, ...], **given: Any) -> None:
    """Start a command as N ranks on this machine, or on several hosts.

    \b
        mlxdist launch -n 2 -- python train.py --epochs 3
        mlxdist launch --hostfile rmlx-hosts.json -- python train.py
        mlxdist launch --hosts node0,node1 -n 2 -- python train.py
        mlxdist launch --backend ring -n 2 -- python train.py
        srun --ntasks-per-node=1 mlxdist launch -n 4 -- python train.py

    Every rank finds its number in MLXDIST_RANK and MLX_RANK, the number of ranks in MLXDIST_WORLD_SIZE and
    MLX_WORLD_SIZE, and its number on its host in MLX_LOCAL_RANK. A program that knows nothing of mlxdist and calls
    mx.distributed.init() gets the same group. Every rank reads what comes from the standard input (--stdin). Each rank
    has a temporary directory (TMPDIR) of its own, which is removed when the job has ended.

    The exit status is that of the first rank that failed, 128 + the signal if it was killed by one. Ctrl-C and SIGTERM
    reach all ranks, and so does SIGUSR1. When the command returns, nothing of the job is left running.

    Hosts are reached by ssh, without a password; mlxdist, the command and its directory have to be there under the same
    names (--python, --cwd). The ranks get their command through the connection, not on a command line, and also the
    variables of --env, --env-file, the hostfile and this shell's MLXDIST_*.

    A command that is a Python script (or begins with -m or -c) is run by the Python of mlxdist, or that of --python,
    which also takes the place of `python`.

    Where something else starts a launcher on each node (--nodes, or srun on several nodes), ssh is not used, and
    MLXDIST_SECRET must be the same everywhere. In a SLURM allocation (salloc, sbatch), without -n and hosts, the job
    runs on its hosts.

    With --max-restarts, a job whose rank has failed is ended as always and then restarted, with pauses of 1, 2, 4
    and up to 30 seconds in between; MLXDIST_RESTART_COUNT has the number of restarts. The program has to load its last
    checkpoint. No restart follows Ctrl-C or SIGTERM. The exit status is that of the last start.
    """
    options = Options(**given)
    if options.print_python:
        click.echo(selection.python or sys.executable)
        return
    if not command:
        raise click.UsageError("No command given. Write it after --: mlxdist launch -n 2 -- python train.py")
    selection, of_nodes = _hosts_or_nodes(selection.with_ranks(options.ranks), options)
    plan = _plan(selection, of_nodes, options, with_python(list(command), selection.python))
    watch = _watch(plan)
    if options.dry_run:
        _show(plan)
        return
    if plan.by_mpirun:
        from mlxdist.launch.mpirun import check_root

        check_root(options.mpi_words(), plan.variables)
    if options.preflight and (status := _preflight(plan, selection, options)):
        sys.exit(status)
    if options.record is not None:
        _record(plan, selection, options.record)
    if options.cwd and selection.hostfile is None:
        os.chdir(options.cwd)
    for text in remove_stale_jobs():
        click.echo(f"mlxdist launch: {text}", err=True)
    follower = click.get_current_context().obj  # of `mlxdist serve`
    with contextlib.nullcontext() if follower is None else follower:
        status = run(plan, follower, watch)
    # Exits without Python's finalization, which takes another 10 ms: only the streams have to be flushed.
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the descriptor was closed
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(status)


def _watch(plan: LaunchPlan) -> StallWatcher | None:
    """Returns the class that finds a job which stands still; None without --stall-timeout."""
    if plan.options.stall_timeout is None:
        return None
    if plan.nodes is not None or plan.backend.name != "mlxdist":
        raise click.UsageError(
            "--stall-timeout asks the ranks of one launcher how far they are, and ranks of mlxdist alone answer: it "
            "goes neither with --nodes nor with another --backend. --timeout limits the time of any job."
        )
    from mlxdist.tools.observe.stall_watch import StallWatch

    return StallWatch


def _preflight(plan: LaunchPlan, selection: HostSelection, options: Options) -> int:
    """Runs the checks of --preflight on the hosts, before anything is started. Returns the exit status."""
    if plan.nodes is not None:
        raise click.UsageError("--preflight asks hosts by ssh, and --nodes does without. On each node: mlxdist doctor")
    from mlxdist.tools.doctor.diagnose import preflight

    if selection.hostfile is None:
        from mlxdist.cluster.hostfile.hosts import Host, Hostfile

        here = Hostfile((Host("localhost", slots=plan.ranks),), source="-n")
        selection = replace(selection, hostfile=here, arguments=["--hosts", f"localhost:{plan.ranks}"])
    return preflight(selection, plan.command, directory=plan.directory, variables=options.variables())


def _record(plan: LaunchPlan, selection: HostSelection, directory: Path) -> None:
    """Writes the records of --record, and shows what differs between hosts."""
    from mlxdist.tools.record.difference import differences, table
    from mlxdist.tools.record.write import write_records

    records = write_records(
        directory,
        None if selection.hostfile is None else selection.hostfile.hosts,
        selection.ssh_config,
        command=plan.command,
        ranks=sum(host.slots for host in plan.backend.hosts) if plan.by_mpirun else plan.size,
        variables=plan.variables,
        working_directory=plan.directory,
        mpi_shim=plan.backend.name == "mlxdist",
    )
    if found := differences(records):
        click.echo(f"mlxdist launch: the hosts differ (mlxdist record diff {shlex.quote(str(directory))}):", err=True)
        click.echo(table(found, _MAX_DIFFERENCES), err=True)


def _hosts_or_nodes(selection: HostSelection, options: Options) -> tuple[HostSelection, Nodes | None]:
    """The hosts to run on, those of SLURM if the user gives none; or this node's place among others."""
    given = (options.nodes, options.node_rank, options.master_addr, options.secret_file)
    is_given = any(value is not None for value in given)
    if selection.hostfile is not None and is_given:
        raise click.UsageError(
            "--nodes is for launchers that something else starts on each node, and takes no hosts: leave out "
            "--hostfile and --hosts, and unset MLX_HOSTFILE."
        )
    alone = options.ranks is not None and not is_given and "SLURM_STEP_ID" not in os.environ
    if selection.hostfile is not None or alone:
        return selection, None
    from mlxdist.launch import nodes

    found = nodes.from_options(*given, os.environ) or nodes.from_slurm_step(os.environ, options.secret_file)
    if found is None and options.secret_file is not None:
        raise click.UsageError("--secret-file goes with --nodes.")
    if found is not None and options.ranks is not None:
        _check_nodes(found, options.ranks, options)
    elif options.ranks is None:
        hosts = nodes.allocation(os.environ) if found is None else None
        if hosts is None:
            raise click.UsageError("Missing option '-n', or '--hostfile', or '--hosts'.")
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts.hosts)
        selection = replace(selection, hostfile=hosts, arguments=[*selection.arguments, "--hosts", listed])
    return selection, found


def _check_nodes(found: Nodes, ranks: int, options: Options) -> None:
    found.ranks(ranks)
    if options.max_restarts:
        raise click.UsageError(
            "--max-restarts is not for --nodes: the launchers do not know of each other. Let what starts them do it."
        )
    if options.starting_port is not None:
        raise click.UsageError("--starting-port is not for --nodes: the port is in --master-addr HOST:PORT.")


def _check_elastic(least: int, ranks: int, of_nodes: Nodes | None, backend: str) -> None:
    if of_nodes is not None or backend != "mlxdist":
        raise click.UsageError(
            "--elastic goes neither with --nodes nor with another --backend: one launcher has to know all ranks, and "
            "ranks of mlxdist alone can go on without one."
        )
    if least > ranks:
        raise click.UsageError(f"--elastic {least}: the job has only {ranks} ranks.")


def _check_emulation(nodes: int, ranks: int, is_here: bool, backend: str) -> None:
    if not is_here or backend != "mlxdist":
        raise click.UsageError("--emulate-nodes is for ranks of mlxdist on this machine alone: -n, and no other hosts.")
    if nodes > ranks:
        raise click.UsageError(f"--emulate-nodes {nodes}: {ranks} ranks are too few; give more with -n.")


def _plan(selection: HostSelection, of_nodes: Nodes | None, options: Options, command: list[str]) -> LaunchPlan:
    on, given = selection.hostfile, options.variables()
    settings = (options.starting_port, options.nccl_port, options.connections, options.verbose)
    backend = choose(options.backend, on, options.ranks, *settings)
    if on is not None and backend.name == "mlxdist":
        on = on.for_mlxdist()
    if of_nodes is not None and backend.name != "mlxdist":
        raise click.UsageError(f"--backend {backend.name} has to know the addresses of all hosts; give --hostfile.")
    ranks = on.ranks if on is not None else options.ranks or 1  # without hosts it is required
    splits_output = True
    if backend.name == "mpi":
        from mlxdist.launch.mpirun import sends_output_elsewhere

        splits_output = not sends_output_elsewhere(options.mpi_words())
        variables, command = _for_mpirun(selection, backend, given, options, command)
        ranks = 1
    elif on is None:
        variables = _for_this_machine(given, command[0], options.cwd or "", backend.name == "mlxdist")
    else:
        variables = _for_hosts(on, given)
    if options.emulate_nodes is not None:
        _check_emulation(options.emulate_nodes, ranks, on is None and of_nodes is None, backend.name)
        # One machine's RDMA devices may not reach each other.
        variables.setdefault("MLXDIST_PROVIDER", "soft")
    if options.elastic is not None:
        _check_elastic(options.elastic, ranks, of_nodes, backend.name)
        if "MLXDIST_TOPOLOGY" in variables:
            raise click.UsageError(
                "--elastic needs a link between every two ranks: MLXDIST_TOPOLOGY, which names pairs, may leave none "
                "without a lost rank. --max-restarts starts all ranks again."
            )
    environment = Environment.read(variables)
    if environment.device_map is not None:
        from mlxdist.cluster.hostfile import device_map

        device_map.load(environment.device_map)
    if backend.name == "mpi":
        check_fast_synch(variables, max(host.slots for host in backend.hosts))
    elif on is None:  # an agent knows what else its host sets
        check_fast_synch(variables, ranks)
    return LaunchPlan(
        ranks=ranks,
        command=command,
        variables=variables,
        options=options,
        hostfile=on,
        directory=absolute(options.cwd or ".", "--cwd"),
        ssh_config=selection.ssh_config if on is not None else None,
        backend=backend,
        nodes=of_nodes,
        logs=options.log_directory(),
        splits_output=splits_output,
    )


def _for_this_machine(given: Mapping[str, str], executable: str, directory: str, with_mpi_shim: bool) -> dict[str, str]:
    """The environment that all ranks on this machine share, without the variables that differ by rank."""
    variables = base_environment(os.environ, with_mpi_shim)
    if with_mpi_shim:
        mpi_shim.check(variables[mpi_shim.VARIABLE])
    variables |= given
    if not os.path.isdir(variables.get("TMPDIR") or "/tmp"):
        raise click.UsageError(f"TMPDIR={variables['TMPDIR']} is no directory for the ranks' temporary directories.")
    if directory and not os.path.isdir(directory):
        raise click.UsageError(f"--cwd {directory} is not a directory; the ranks are to run there.")
    check_command(executable, variables, directory)
    return variables


def _for_hosts(on: Hostfile, given: Mapping[str, str]) -> dict[str, str]:
    """The variables to set for ranks on hosts, in addition to the environment that their host gives them."""
    from mlxdist.cluster.hostfile.rank_shares import rank_share_variables

    variables = parse_settings(on.envs, "envs of the hostfile")
    variables |= {name: v for name, v in os.environ.items() if name.startswith("MLXDIST_") and name not in OF_JOB}
    variables |= {name: os.environ[name] for name in _OF_SCHEDULER if name in os.environ}
    rows = [[list(devices) or None for devices in host.rdma] for host in on.hosts]
    if any(rows) and "MLXDIST_DEVICE_MAP" not in variables:
        variables["MLXDIST_DEVICE_MAP"] = json.dumps(rows)
    # --env is last: the user's settings override measured shares.
    return variables | rank_share_variables(on) | dict(given)


def _for_mpirun(
    selection: HostSelection, backend: Backend, given: Mapping[str, str], options: Options, command: list[str]
) -> tuple[dict[str, str], list[str]]:
    """The environment of mpirun, and its command line, which has the names of variables but not their values."""
    from mlxdist.cluster.ssh.ssh import is_this_machine
    from mlxdist.launch.mpirun import mpirun_command, mpirun_variables, reach_variables

    arguments = options.mpi_words()
    exported = _for_hosts(selection.hostfile, given) if selection.hostfile is not None else dict(given)
    exported = mpirun_variables(os.environ) | exported
    names = [*exported, "MLXDIST_RENDEZVOUS", "MLXDIST_SECRET", "MLXDIST_JOB", "MLXDIST_RESTART_COUNT"]
    directory = absolute(options.cwd, "--cwd") if options.cwd else None
    others = options.prefix and not all(is_this_machine(host.name) for host in backend.hosts)
    words = mpirun_command(backend.hosts, names, directory, arguments, command, tagged=others)
    given = exported | reach_variables(selection.ssh)
    variables = _for_this_machine(given, words[0], options.cwd or "", with_mpi_shim=False)
    return variables, words


def _show(plan: LaunchPlan) -> None:
    """Prints what --dry-run shows: the commands of the ranks and of the servers, and the variables."""
    labels = plan.labels()
    for rank in plan.numbers:
        click.echo(f"[{labels[rank]}] {shlex.join(plan.command)}")
    if plan.hostfile is not None and not plan.by_mpirun:
        for host in plan.hostfile.hosts:
            if plan.ssh_config is not None:
                click.echo(f"{host.name}: {shlex.join(plan.ssh_config.server(host.name))}")
        for name, value in plan.variables.items():
            click.echo(f"{name}={value}")
