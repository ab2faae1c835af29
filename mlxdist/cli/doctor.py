"""The command line of `mlxdist doctor`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.base.user_path import USER_PATH
from mlxdist.cluster.hostfile.options import HostSelection, host_options

__all__ = ["doctor"]


@click.command(context_settings={"allow_interspersed_args": False})
@host_options
@click.option(
    "--script",
    type=USER_PATH,
    metavar="FILE",
    help="Must be the same on all hosts.  [default: the .py file of COMMAND]",
)
@click.option("--model", metavar="MODEL", help="Must be the same on all hosts.  [default: --model of COMMAND]")
@click.option(
    "--cwd", type=USER_PATH, metavar="DIR", help="Where ranks will run, on every host. [default: current directory]"
)
@click.option("--quick", is_flag=True, help="Measure nothing: no links, no GPU.")
@click.option(
    "--advertised",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GBIT",
    help="Gbit/s of a link one way, to compare its bandwidth with.  [default: what its ports say]",
)
@click.option(
    "--level",
    type=click.IntRange(1, 4),
    default=1,
    show_default=True,
    help="From 2 on, traffic with checked data for 1, 10 or 60 minutes.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 7 * 86400),
    metavar="SECONDS",
    help="Another time for the traffic of --level 2 to 4.",
)
@click.option("--full", is_flag=True, help="Compare every byte of the model, not samples of its weights.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--report",
    "report_file",
    type=OUTPUT_FILE,
    help="Write everything that a bug report needs here, with private data left out. Takes minutes.",
)
@click.option("--exclude-failed", is_flag=True, help="Write a hostfile without the hosts that have failed: --output.")
@click.option("--output", type=USER_PATH, metavar="FILE", help="Where --exclude-failed writes.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND [ARGUMENTS]...]")
def doctor(
    selection: HostSelection,
    script: str | None,
    model: str | None,
    cwd: str | None,
    quick: bool,
    advertised: float | None,
    level: int,
    seconds: float | None,
    full: bool,
    as_json: bool,
    report_file: Path | None,
    exclude_failed: bool,
    output: str | None,
    command: tuple[str, ...],
) -> None:
    """Check hosts before a job starts on them: all at once, with what to do where something is wrong.

    \b
        mlxdist doctor                                           this machine
        mlxdist doctor --hostfile rmlx-hosts.json
        mlxdist doctor --hosts node0,node1 -- python train.py --model ~/models/m
        mlxdist doctor --hostfile all.json --exclude-failed --output rmlx-hosts.json
        mlxdist doctor --hostfile rmlx-hosts.json --level 3      ten minutes of load
        mlxdist doctor --report report.md                        for a bug report: docs/first-contact.md

    Verdicts: ok; note, good to know; warn, a job runs, but worse than it could; fail, it would not run, or not
    correctly; skip, this could not be checked. docs/doctor.md describes every check.

    Exit status 0 if nothing has failed, else 1; with --exclude-failed, if nothing has on the remaining hosts; with
    --report, if the file is written.
    """
    if exclude_failed and (not output or selection.hostfile is None):
        raise click.UsageError("--exclude-failed writes a hostfile: give --hostfile or --hosts, and --output.")
    if output and not exclude_failed:
        raise click.UsageError("--output is where --exclude-failed writes; give that, too.")
    if report_file and (as_json or exclude_failed or quick):
        raise click.UsageError("--report has every check, once: leave out --json, --quick and --exclude-failed.")
    if level > 1 and (quick or report_file):
        raise click.UsageError("--level 2 to 4 have every check and traffic: leave out --quick and --report.")
    if seconds is not None and level == 1:
        raise click.UsageError("--seconds is the time of the traffic: give --level 2, 3 or 4, too.")
    from mlxdist.launch.options import absolute
    from mlxdist.tools.doctor import report
    from mlxdist.tools.doctor.diagnose import diagnose, failed_hosts, make_options
    from mlxdist.tools.doctor.findings import Verdict

    directory = absolute(cwd or ".", "--cwd")
    options = make_options(
        selection,
        command,
        script=script,
        model=model,
        directory=directory,
        quick=quick,
        full=full,
        advertised=advertised or 0.0,
        level=level,
        seconds=seconds,
    )
    if report_file is not None:
        from mlxdist.tools.doctor.diagnostics.command import make_report
        from mlxdist.tools.doctor.diagnostics.sections import Context

        sys.exit(make_report(Context(selection, options), report_file))
    cluster, results = diagnose(selection, options)
    failed = failed_hosts(cluster.names, results)
    if as_json:
        click.echo(json.dumps(report.as_json(cluster, results, failed), indent=2))
    else:
        report.print_report(cluster, results)
    if output:
        _write(selection, failed, output)
    failures = [f for result in results for f in result.findings if f.verdict is Verdict.FAIL]
    # Without its failed hosts the job can start, unless a failure is about all hosts together.
    sys.exit(int(any(not (exclude_failed and failure.hosts) for failure in failures)))


def _write(selection: HostSelection, failed: Sequence[str], output: str) -> None:
    from mlxdist.cluster.hostfile.writing import save
    from mlxdist.tools.doctor.diagnose import without_hosts

    assert selection.hostfile is not None
    remaining = without_hosts(selection.hostfile, failed)
    if not remaining.hosts:
        raise click.ClickException(f"every host has failed; {output} was not written")
    save(remaining, output, remaining.format)
    without = f", without {', '.join(failed)}" if failed else ""
    count = len(remaining.hosts)
    click.echo(f"wrote {output}: {count} host{'s' * (count > 1)}{without}", err=True)
