"""The command line of `mlxdist doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.cluster.hostfile.options import HostSelection, host_options

if TYPE_CHECKING:
    from mlxdist.tools.doctor.cluster import Cluster, Question
    from mlxdist.tools.doctor.examine import Say
    from mlxdist.tools.doctor.findings import Result

__all__ = ["diagnose", "doctor", "question_of"]


@click.command(context_settings={"allow_interspersed_args": False})
@host_options
@click.option("--script", metavar="FILE", help="Must be the same on all hosts.  [default: the .py file of COMMAND]")
@click.option("--model", metavar="MODEL", help="Must be the same on all hosts.  [default: --model of COMMAND]")
@click.option("--cwd", metavar="FOLDER", help="Where ranks will run, on every host.  [default: the current folder]")
@click.option("--quick", is_flag=True, help="Measure nothing: no links, no GPU.")
@click.option("--full", is_flag=True, help="Compare every byte of the model, not parts of its weights.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--report",
    "report_file",
    type=OUTPUT_FILE,
    help="Write everything that a bug report needs here, with private data left out. Takes minutes.",
)
@click.option("--exclude-failed", is_flag=True, help="Write a hostfile without the hosts that have failed: --output.")
@click.option("--output", metavar="FILE", help="Where --exclude-failed writes.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND [ARGUMENTS]...]")
def doctor(
    chosen: HostSelection,
    script: str | None,
    model: str | None,
    cwd: str | None,
    quick: bool,
    full: bool,
    as_json: bool,
    report_file: Path | None,
    exclude_failed: bool,
    output: str | None,
    command: tuple[str, ...],
) -> None:
    """Check hosts before a job is started on them: all at once, with what to do where something is wrong.

    \b
        mlxdist doctor                                           this machine
        mlxdist doctor --hostfile rmlx-hosts.json
        mlxdist doctor --hosts node0,node1 -- python train.py --model ~/models/m
        mlxdist doctor --hostfile all.json --exclude-failed --output rmlx-hosts.json
        mlxdist doctor --report report.md                        for a bug report: docs/first-contact.md

    Verdicts: ok; note, good to know; warn, a job runs, but worse than it could; fail, it would not run, or not rightly;
    skip, this could not be looked at. docs/doctor.md describes every check.

    Exit status 0 if nothing has failed, else 1; with --exclude-failed, if nothing has on the hosts that are left; with
    --report, if the file is written.
    """
    if exclude_failed and (not output or chosen.hostfile is None):
        raise click.UsageError("--exclude-failed writes a hostfile: give --hostfile or --hosts, and --output.")
    if output and not exclude_failed:
        raise click.UsageError("--output is where --exclude-failed writes; give that, too.")
    if report_file and (as_json or exclude_failed or quick):
        raise click.UsageError("--report has every check, once: leave out --json, --quick and --exclude-failed.")
    from mlxdist.launch.options import absolute

    folder = absolute(cwd or ".", "--cwd")
    question = question_of(chosen, command, script=script, model=model, folder=folder, quick=quick, full=full)
    if report_file is not None:
        from mlxdist.tools.doctor.diagnostics.command import make_report
        from mlxdist.tools.doctor.diagnostics.sections import Context

        sys.exit(make_report(Context(chosen, question, diagnose), report_file))
    cluster, results = diagnose(chosen, question)

    from mlxdist.tools.doctor import report
    from mlxdist.tools.doctor.exclude import failed_hosts
    from mlxdist.tools.doctor.findings import Verdict

    failed = failed_hosts(cluster.names, results)
    if as_json:
        click.echo(json.dumps(report.as_json(cluster, results, failed), indent=2))
    else:
        report.print_report(cluster, results)
    if exclude_failed:
        _write(chosen, failed, output)
    failures = [f for result in results for f in result.findings if f.verdict is Verdict.FAIL]
    # Without the hosts that have failed the rest is well, unless something is about no host.
    sys.exit(int(any(not (exclude_failed and failure.hosts) for failure in failures)))


def question_of(
    chosen: HostSelection,
    command: Sequence[str],
    *,
    folder: str,
    script: str | None = None,
    model: str | None = None,
    variables: Mapping[str, str] | None = None,
    quick: bool = False,
    full: bool = False,
) -> Question:
    """What to examine the hosts for. Script and model are found in the command, where it has them."""
    from mlxdist.base.environment import OF_JOB
    from mlxdist.tools.doctor.cluster import Question

    hostfile = chosen.hostfile
    envs = dict(setting.split("=", 1) for setting in hostfile.envs) if hostfile else {}
    ours = {name: v for name, v in os.environ.items() if name.startswith("MLXDIST_") and name not in OF_JOB}
    return Question(
        command=tuple(command),
        script=script or next((word for word in command[:3] if word.endswith(".py")), ""),
        model=model or _value_of("--model", command),
        guessed=not model,
        folder=folder,
        variables=envs | ours | dict(variables or {}),
        backend=hostfile.backend if hostfile else "",
        quick=quick,
        full=full,
    )


def diagnose(chosen: HostSelection, question: Question, say: Say | None = None) -> tuple[Cluster, list[Result]]:
    """Asks all hosts, runs a job on those that have passed, and says what all the checks find.

    ``say``: shows which host is at what; None: on the terminal.
    """
    from mlxdist.tools.doctor.checks import run_checks
    from mlxdist.tools.doctor.cluster import Job
    from mlxdist.tools.doctor.examine import examine
    from mlxdist.tools.doctor.exclude import failed_hosts
    from mlxdist.tools.doctor.job import try_job

    hosts = chosen.hosts()
    with contextlib.nullcontext(say) if say else _progress([host.name for host in hosts]) as say:
        cluster = examine(hosts, chosen.ssh_config, question, say)
        results = run_checks(cluster, after_job=False)
        failed = failed_hosts(cluster.names, results)
        passed = [name for name in cluster.names if name not in failed]
        if not passed:
            cluster.job = Job(skipped="no host has passed the checks before")
        else:
            for name in passed:
                say(name, "values and links")
            cluster.job = try_job(chosen, passed, question)
        return cluster, results + run_checks(cluster, after_job=True)


@contextlib.contextmanager
def _progress(names: Sequence[str]) -> Iterator[Say]:
    """Which host is at what, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.fields[host]}"), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task("waiting", total=None, host=name) for name in names}
        yield lambda name, doing: bars.update(tasks[name], description=doing or "done")


def _write(chosen: HostSelection, failed: Sequence[str], output: str) -> None:
    from mlxdist.base.errors import InvalidArgument
    from mlxdist.tools.doctor.exclude import hostfile_without

    left = [host for host in chosen.hosts() if host.name not in failed]
    if not left:
        raise click.ClickException(f"every host has failed; {output} was not written")
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(hostfile_without(chosen.hostfile, failed))
    except (OSError, InvalidArgument) as error:
        raise click.ClickException(f"{output}: {getattr(error, 'strerror', None) or error}") from None
    without = f", without {', '.join(failed)}" if failed else ""
    click.echo(f"wrote {output}: {len(left)} host{'s' * (len(left) > 1)}{without}", err=True)


def _value_of(option: str, command: Sequence[str]) -> str:
    for word, after in zip(command, [*command[1:], ""]):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
