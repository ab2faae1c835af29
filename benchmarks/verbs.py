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
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from engine import compile_program
from rich.console import Console
from rich.table import Table
from verbs_instructions import Counter, Work

import mlxdist
from mlxdist.tools.bench.bandwidth import algorithm_bandwidth
from mlxdist.tools.bench.benchmark import finish, repeats_option
from mlxdist.tools.bench.machine import describe_command, describe_machine
from mlxdist.tools.bench.results import Comparison, Result, Target, by_case, case_name, table_of
from mlxdist.tools.bench.runner import Runner
from mlxdist.tools.bench.timing import ForeignLoad, quantiles

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts" / "rxe"))
from machine import Machine, MachineError, Unavailable, accelerator

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"latency": [8, 64, 512, 4 * KIB], "bandwidth": [64 * KIB, 256 * KIB, MIB, 4 * MIB]}
# How many times as long as perftest's a message may take.
TARGETS = {"latency": 1.3, "bandwidth": 1 / 0.9}
OURS, PERFTEST = "mlxdist", "perftest"
PING_PONGS = 300
COUNTED_PING_PONGS = 1000
RUN_BYTES, RUN_MESSAGES = 24 * MIB, 12  # one way in a run for bandwidth: bytes, and at least this many messages
SECONDS = 60
# Of `Work`, with digits after the point.
SHOWN = {"kernel": 0, "program": 0, "work_requests": 2, "packets": 2}

# The server first; the client when that listens (port 18515, in hexadecimal). What the server prints counts: for
# bandwidth it is the receiver.
COMMAND = """
options="--connection=UC --gid-index=1 --CPU-freq --size={bytes} --iters={count}"
taskset --cpu-list 0 timeout {seconds} {program} $options --ib-dev=rxe0 > /tmp/perftest &
until grep -q ':4853 .* 0A' /proc/net/tcp; do sleep 0.05; done
taskset --cpu-list 1 timeout {seconds} {program} $options --ib-dev=rxe1 10.0.0.1 > /dev/null
wait && cat /tmp/perftest
"""


def results_of(sizes: dict[str, list[int]]) -> list[Result]:
    """Of each operation and size one by either program, without times."""
    cases = [{"operation": operation, "bytes": size} for operation, of_it in sizes.items() for size in of_it]
    return [{"case": case, "variant": variant, "wrong": 0} for case in cases for variant in (OURS, PERFTEST)]


def _count(case: dict[str, Any]) -> int:
    return PING_PONGS if case["operation"] == "latency" else max(RUN_MESSAGES, RUN_BYTES // case["bytes"])


def _run_ours(machine: Machine, case: dict[str, Any], count: int) -> dict[str, Any]:
    arguments = f"{case['operation']} {case['bytes']} {count} ibverbs rxe0 1 rxe1 1"
    run = machine.run(f"/exchange/verbs {arguments}", SECONDS)
    if run.status:
        raise click.ClickException(f"verbs {arguments} ended with status {run.status}:\n{run.output}")
    return json.loads(run.output)


def _run_perftest(machine: Machine, case: dict[str, Any], count: int) -> dict[str, Any]:
    """Without a result if it has lost a message."""
    is_latency = case["operation"] == "latency"
    program = "ib_send_lat" if is_latency else "ib_send_bw"
    command = COMMAND.format(program=program, bytes=case["bytes"], count=count, seconds=SECONDS // 3)
    run = machine.run(command, SECONDS)
    if run.status == 124:
        return {"hung": 1}
    # The last line of numbers has the size, the messages, and then: shortest, longest, typical; or: peak, average.
    lines = [line.split() for line in run.output.splitlines() if line.split()[:1] == [str(case["bytes"])]]
    if run.status or not lines:
        raise click.ClickException(f"{program} ended with status {run.status}:\n{run.output}")
    return {"result": float(lines[-1][4 if is_latency else 3])}


RUN = {OURS: _run_ours, PERFTEST: _run_perftest}


def measure(machine: Machine, repeats: int, sizes: dict[str, list[int]]) -> list[Result]:
    """Runs both programs ``repeats`` times for each size.

    Raises:
        click.ClickException: a program could not be compiled, or has failed.
    """
    compile_program("verbs.c", machine.exchange)
    results = results_of(sizes)
    runs: list[list[dict[str, Any]]] = [[] for _ in results]
    for _ in range(repeats):
        for place in random.sample(range(len(results)), len(results)):
            case = results[place]["case"]
            runs[place].append(RUN[results[place]["variant"]](machine, case, _count(case)))
    for result, found in zip(results, runs):
        times = [_microseconds(result["case"], run["result"]) for run in found if "result" in run]
        result["refused"] = None if times else "a message was lost in every run"
        result["microseconds"] = quantiles(np.array(times)) if times else None
        if times and result["case"]["operation"] == "bandwidth":
            result["algbw"] = algorithm_bandwidth(result["case"]["bytes"], result["microseconds"]["median"])
        result |= {name: sum(run.get(name, 0) for run in found) for name in ("hung", "retransmissions")}
    return results


def _microseconds(case: dict[str, Any], result: float) -> float:
    """Of a message: both programs report the bandwidth in MiB/s."""
    return result if case["operation"] == "latency" else case["bytes"] / MIB / result * 1e6


def count_work(results: list[Result]) -> None:
    """Adds the work of each result, in a machine of its own, which is slowed down by counting.

    Raises:
        click.ClickException: a program could not be compiled, has failed, or has lost a message.
    """
    with tempfile.TemporaryDirectory(prefix="mlxdist-verbs-") as directory:
        counter = Counter(Path(directory))
        with Machine(plugin=counter.option) as machine:
            compile_program("verbs.c", machine.exchange)
            counter.start(machine)
            for result in results:
                result["work"] = asdict(_work(counter, machine, result["case"], result["variant"]))


def _work(counter: Counter, machine: Machine, case: dict[str, Any], variant: str) -> Work:
    def run(count: int) -> None:
        if "hung" in RUN[variant](machine, case, count):
            raise click.ClickException(f"{variant} has lost a message of {case['bytes']} bytes while it was counted")

    if case["operation"] == "bandwidth":
        return counter.work(run, _count(case), _count(case))
    # There and back; verbs.c warms up with a tenth more.
    warm_up = COUNTED_PING_PONGS // 10 if variant == OURS else 0
    return counter.work(run, COUNTED_PING_PONGS, 2 * (COUNTED_PING_PONGS + warm_up))


def work_table(results: list[Result]) -> Table:
    rows = []
    for row in by_case({"cases": results}):
        ours, theirs = row[OURS]["work"], row[PERFTEST]["work"]
        ratio = (ours["kernel"] + ours["program"]) / (theirs["kernel"] + theirs["program"])
        cells = [f"{ours[name]:.{digits}f} / {theirs[name]:.{digits}f}" for name, digits in SHOWN.items()]
        rows.append([case_name(row[OURS]["case"]), *cells, f"{ratio:.2f}"])
    columns = ["", "kernel's instructions", "program's instructions", "work requests", "packets", "instructions' ratio"]
    return table_of("what one message takes, both sides together, without polling: ours / perftest", columns, rows)


def targets(results: list[Result]) -> list[Target]:
    found = []
    for row in by_case({"cases": results}):
        case, theirs = row[OURS]["case"], row[PERFTEST]["microseconds"]
        bound = TARGETS[case["operation"]]
        wanted = f"{bound:.3g}x perftest or less"
        found.append(Target.of(case_name(case), wanted, row[OURS]["microseconds"], theirs and theirs["median"], bound))
    return found


def show(results: dict[str, Any], console: Console) -> None:
    more = {
        "perftest hung": lambda row: str(row[PERFTEST]["hung"]),
        "retransmitted": lambda row: str(row[OURS]["retransmissions"]),
    }
    Comparison(lambda results: "one message, UC", columns=more)(results, console)
    if "work" in results["cases"][0]:
        console.print(work_table(results["cases"]))


@click.command()
@repeats_option(9)
@click.option("--output", type=click.Path(path_type=Path), help="Also write the results as JSON here.")
def main(repeats: int, output: Path | None) -> None:
    """Measure send and recv and perftest, over soft-RoCE in a virtual machine."""
    setup, foreign = describe_command(), ForeignLoad(mlxdist.init())
    try:
        with Machine() as machine:
            found = measure(machine, repeats, SIZES)
        count_work(found)
    except (MachineError, Unavailable) as error:
        raise click.ClickException(str(error)) from None
    here = describe_machine()
    setup |= {"ranks": 2, "machines": [here], "mlx": here["mlx"], "mlxdist": here["mlxdist"], "device": "cpu"}
    setup |= {"provider": f"ibverbs: soft-RoCE in a virtual machine run by {accelerator()}", "limits": []}
    job = {"rows": [found], "absent": [], "foreign_cpu_share": foreign.share()}
    results = Runner("verbs", repeats=repeats).results([job], [result["case"] for result in found[::2]], setup)
    results["targets"] = [target.judged() for target in targets(found)]
    finish(results, show, False, output)


if __name__ == "__main__":
    main()
