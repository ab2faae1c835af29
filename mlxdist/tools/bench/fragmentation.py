"""`mlxdist bench fragmentation`: what it costs to send the same bytes as many messages instead of one."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from .results import limits_table, times_of
from .runner import Report, Runner, benchmark
from .sizes import SIZE, format_size

SHOWN = {
    "messages": "messages_sent",
    "headers": "header_bytes_sent",
    "payload": "payload_bytes_sent",
    "control": "control_messages_sent",
}


@benchmark(repeats=9)
@click.option("--bytes", "size", type=SIZE, default="16MiB", show_default=True, help="Bytes in all.")
@click.option("--messages", type=click.IntRange(2, 100_000), default=1000, show_default=True, help="Instead of one.")
def fragmentation(runner: Runner, size: int, messages: int) -> Report:
    """Send the same bytes as 1 message and as 1000, with send and recv and with all_sum.

    Times are those of all the bytes; the counters are rank 0's, for one pass over all the bytes.
    """
    if size % 4:
        raise click.BadParameter(f"{format_size(size)} are no whole number of float32", param_hint="--bytes")
    if size // 4 < messages:
        problem = f"{format_size(size)} are too few for {messages} messages of float32"
        raise click.BadParameter(problem, param_hint="--bytes")
    cases = [{"operation": name, "dtype": "float32", "bytes": size} for name in ("send_recv", "all_sum")]
    return Report(runner.run("mlxdist.tools.bench.workloads:Fragmentation", cases, messages=messages), _show)


def _show(results: dict[str, Any], console: Console) -> None:
    rows = []
    for one, several in zip(results["cases"][::2], results["cases"][1::2]):
        for result in (one, several):
            case, times = result["case"], result["microseconds"]
            row = [case["operation"], str(case["messages"])]
            row += [f"{times[name]:.0f}" for name in ("median", "p99")] if times else ["refused", ""]
            ratio = times_of(result, one)
            row += [
                "" if ratio is None else f"{ratio:.2f}",
                *(str(result["counters"][name]) for name in SHOWN.values()),
            ]
            rows.append((result, [*row, str(result["wrong"])]))
    columns = ["operation", "in", "median", "p99", "times as one", *SHOWN, "#wrong"]
    size = format_size(results["cases"][0]["case"]["bytes"])
    title = f"{results['setup']['ranks']} ranks; {size} of float32 in all, in 1 and in several messages; microseconds"
    console.print(limits_table(title, columns, rows, console))
    console.print("messages, headers and payload (bytes), control messages: sent by rank 0 in one pass over all bytes.")
