"""The engine's send and recv compared with perftest's ib_send_lat and ib_send_bw over UC, on soft-RoCE.

    python benchmarks/verbs.py

Both run in the same virtual machine (docs/soft-roce.md), one after the other, in another order each time, because
what one emulated processor does to another differs by a factor from one moment to the next: what counts is the ratio
of the medians. Each end runs on the processor that receives its packets: where the scheduler puts the two ends is
another factor of 1.7. ib_send_bw waits for ever for a message that UC has lost; such a run is counted, and has no
result.

In a second machine the work that a message takes is counted (verbs_instructions.py): that does not depend on the time.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from engine import compile_program
from rich.table import Table
from verbs_instructions import Counter, Work

import mlxdist
from mlxdist.tools.bench.results import foreign_load, results_console, table_of
from mlxdist.tools.bench.runner import repeats_option
from mlxdist.tools.bench.sizes import format_size
from mlxdist.tools.bench.timing import ForeignLoad

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts" / "rxe"))
from machine import Machine, MachineError, Unavailable, accelerator

KIB, MIB = 1 << 10, 1 << 20
LATENCY_SIZES = [8, 64, 512, 4 * KIB]
BANDWIDTH_SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB]
LATENCY_TARGET = 1.3  # of perftest's or less
BANDWIDTH_TARGET = 0.9  # of perftest's or more
PING_PONGS = 300
COUNTED_PING_PONGS = 1000
RUN_BYTES, RUN_MESSAGES = 24 * MIB, 12  # one way in a run for bandwidth: bytes, and at least this many messages
SECONDS = 60

# The server first; the client when that listens (port 18515, in hexadecimal). What the server prints counts: for
# bandwidth it is the receiver.
PERFTEST = """
options="--connection=UC --gid-index=1 --CPU-freq --size={bytes} --iters={count}"
taskset --cpu-list 0 timeout {seconds} {program} $options --ib-dev=rxe0 > /tmp/perftest &
until grep -q ':4853 .* 0A' /proc/net/tcp; do sleep 0.05; done
taskset --cpu-list 1 timeout {seconds} {program} $options --ib-dev=rxe1 10.0.0.1 > /dev/null
wait && cat /tmp/perftest
"""


@dataclass
class Case:
    """One size, measured by both."""

    what: str  # "latency" in microseconds, or "bandwidth" in MiB/s
    bytes: int
    ours: list[float] = field(default_factory=list)
    perftest: list[float] = field(default_factory=list)
    hung: int = 0  # runs of perftest that have lost a message
    retransmissions: int = 0
    our_work: Work | None = None
    work_of_perftest: Work | None = None

    def ratio(self) -> float | None:
        return statistics.median(self.ours) / statistics.median(self.perftest) if self.perftest else None

    def target(self) -> str:
        return f"{LATENCY_TARGET} or less" if self.what == "latency" else f"{BANDWIDTH_TARGET} or more"

    def met(self) -> bool | None:
        """None: perftest has lost a message in every run, so that there is nothing to compare with."""
        ratio = self.ratio()
        if ratio is None:
            return None
        return ratio <= LATENCY_TARGET if self.what == "latency" else ratio >= BANDWIDTH_TARGET


def _count(case: Case) -> int:
    return PING_PONGS if case.what == "latency" else max(RUN_MESSAGES, RUN_BYTES // case.bytes)


def _call_ours(machine: Machine, case: Case, count: int) -> dict[str, Any]:
    arguments = f"{case.what} {case.bytes} {count} ibverbs rxe0 1 rxe1 1"
    run = machine.run(f"/exchange/verbs {arguments}", SECONDS)
    if run.status:
        raise click.ClickException(f"verbs {arguments} ended with status {run.status}:\n{run.output}")
    return json.loads(run.output)


def _run_ours(machine: Machine, case: Case) -> None:
    result = _call_ours(machine, case, _count(case))
    case.ours.append(result["result"])
    case.retransmissions += result["retransmissions"]


def _call_perftest(machine: Machine, case: Case, count: int) -> float | None:
    """None: it has lost a message."""
    program = "ib_send_lat" if case.what == "latency" else "ib_send_bw"
    command = PERFTEST.format(program=program, bytes=case.bytes, count=count, seconds=SECONDS // 3)
    run = machine.run(command, SECONDS)
    if run.status == 124:
        return None
    # The last line of numbers has the size, the messages, and then: shortest, longest, typical; or: peak, average.
    lines = [line.split() for line in run.output.splitlines() if line.split()[:1] == [str(case.bytes)]]
    if run.status or not lines:
        raise click.ClickException(f"{program} ended with status {run.status}:\n{run.output}")
    return float(lines[-1][4 if case.what == "latency" else 3])


def _run_perftest(machine: Machine, case: Case) -> None:
    result = _call_perftest(machine, case, _count(case))
    if result is None:
        case.hung += 1
    else:
        case.perftest.append(result)


def measure(machine: Machine, repeats: int, latency_sizes: list[int], bandwidth_sizes: list[int]) -> list[Case]:
    """Runs both programs ``repeats`` times for each size.

    Raises:
        click.ClickException: a program could not be compiled, or has failed.
    """
    compile_program("verbs.c", machine.exchange)
    cases = [Case("latency", size) for size in latency_sizes] + [Case("bandwidth", size) for size in bandwidth_sizes]
    turns = [(case, run) for case in cases for run in (_run_ours, _run_perftest)]
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(turns)
        for case, run in turns:
            run(machine, case)
    return cases


def count_work(cases: list[Case]) -> None:
    """Fills in the work of each case, in a machine of its own, which is slowed down by counting.

    Raises:
        click.ClickException: a program could not be compiled, has failed, or has lost a message.
    """
    with tempfile.TemporaryDirectory(prefix="mlxdist-verbs-") as directory:
        counter = Counter(Path(directory))
        with Machine(plugin=counter.option) as machine:
            compile_program("verbs.c", machine.exchange)
            counter.start(machine)
            for case in cases:
                _count_work(counter, machine, case)


def _count_work(counter: Counter, machine: Machine, case: Case) -> None:
    def perftest(count: int) -> None:
        if _call_perftest(machine, case, count) is None:
            raise click.ClickException(f"perftest has lost a message of {case.bytes} bytes while it was counted")

    # There and back; verbs.c warms up with a tenth more.
    count = COUNTED_PING_PONGS if case.what == "latency" else _count(case)
    ours, theirs = (2 * (count + count // 10), 2 * count) if case.what == "latency" else (count, count)
    case.our_work = counter.work(lambda count: _call_ours(machine, case, count), count, ours)
    case.work_of_perftest = counter.work(perftest, count, theirs)


def work_table(cases: list[Case]) -> Table:
    rows = []
    for case in cases:
        ours, theirs = case.our_work, case.work_of_perftest
        if ours and theirs:
            ratio = (ours.kernel + ours.program) / (theirs.kernel + theirs.program)
            rows.append(
                [
                    case.what,
                    format_size(case.bytes),
                    f"{ours.kernel:.0f} / {theirs.kernel:.0f}",
                    f"{ours.program:.0f} / {theirs.program:.0f}",
                    f"{ratio:.2f}",
                    f"{ours.work_requests:.2f} / {theirs.work_requests:.2f}",
                    f"{ours.packets:.2f} / {theirs.packets:.2f}",
                ]
            )
    columns = ["", "bytes", "kernel's instructions", "program's instructions", "ratio", "work requests", "packets"]
    return table_of("what one message takes, both sides together, without polling: ours / perftest", columns, rows)


def spread(samples: list[float]) -> str:
    if not samples:
        return "none ended"
    return f"{statistics.median(samples):.4g} ({min(samples):.4g} to {max(samples):.4g})"


def table(cases: list[Case]) -> Table:
    rows = []
    for case in cases:
        unit = "us one way" if case.what == "latency" else "MiB/s at the receiver"
        ratio = case.ratio()
        verdict = [
            "" if ratio is None else f"{ratio:.2f}",
            case.target(),
            {None: "", True: "yes", False: "no"}[case.met()],
        ]
        lost = [str(case.hung), str(case.retransmissions)]
        rows.append([unit, format_size(case.bytes), spread(case.ours), spread(case.perftest), *lost, *verdict])
    columns = ["", "bytes", "ours", "perftest", "hung", "retransmitted", "ratio", "target", "met"]
    title = f"ours and perftest over UC, soft-RoCE in a virtual machine run by {accelerator()}"
    return table_of(title, columns, rows)


@click.command()
@repeats_option(9)
@click.option("--output", type=click.Path(path_type=Path), help="All samples, as JSON.")
def main(repeats: int, output: Path | None) -> None:
    """Measure send and recv and perftest, over soft-RoCE in a virtual machine."""
    foreign = ForeignLoad(mlxdist.init())
    try:
        with Machine() as machine:
            cases = measure(machine, repeats, LATENCY_SIZES, BANDWIDTH_SIZES)
        count_work(cases)
    except (MachineError, Unavailable) as error:
        raise click.ClickException(str(error)) from None
    results = {
        "accelerator": accelerator(),
        "repeats": repeats,
        "foreign_cpu_share": foreign.share(),
        "cases": [asdict(case) | {"ratio": case.ratio(), "met": case.met()} for case in cases],
    }
    results_console().print(table(cases))
    results_console().print(work_table(cases))
    if load := foreign_load(results):
        click.echo(f"{load}: repeat this on a quiet machine.")
    if output:
        output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
