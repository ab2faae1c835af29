"""Measures the HTTP of a running `mlxdist serve`: requests per second, time to the first byte, memory of a connection.

    mlxdist serve models/tiny --port 8081 &
    python benchmarks/serve_http.py http://127.0.0.1:8081
    python benchmarks/serve_http.py before=http://127.0.0.1:8081 after=http://127.0.0.1:8082

Answers have one token of a short prompt, so that a tiny model takes less than HTTP does. Several servers are measured
in turn, in an order that changes, so that what else the machine does hits all of them alike; figures are medians of the
rounds, with the least and the most. Memory is that of the process that listens, on Linux, and is measured once, first:
what a process has freed it keeps for the next connections. MLXDIST_API_KEY is the key, if the servers have one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.progress import track

from mlxdist.tools.bench.benchmark import repeats_option
from mlxdist.tools.bench.results import results_console, table_of

SECONDS = 60  # without a byte
BODY = {"prompt": "one", "max_tokens": 1}
HEADERS = {"Content-Type": "application/json"}
PER_SECOND, ALONE, FIRST_BYTE, HEALTH, IDLE = (
    "requests/s",
    "one client, ms",
    "first byte of a stream, ms",
    "/health, ms",
    "idle connection, KiB",
)


class Server:
    """A running server. ``text``: its address, or NAME=ADDRESS."""

    def __init__(self, text: str) -> None:
        name, _, address = text.rpartition("=")
        where = urlsplit(address)
        if where.scheme != "http" or where.port is None:
            raise click.UsageError(f"{address} is not an address such as http://127.0.0.1:8080")
        self.name, self._host, self._port = name or address, where.hostname or "", where.port
        self._key = os.environ.get("MLXDIST_API_KEY", "")

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is made with the first request, and again whenever the server has closed it."""
        return http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)

    def ask(self, connection: http.client.HTTPConnection, stream: bool = False) -> float:
        """The seconds from the request to the first byte of the answer's body."""
        headers = HEADERS | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(BODY | {"stream": stream}), headers)
        response = connection.getresponse()
        response.read(1)
        seconds = time.perf_counter() - begin
        rest = response.read()
        if response.status != 200:
            raise click.ClickException(f"{self.name}: HTTP status {response.status}: {rest[:500]!r}")
        return seconds

    def health(self, connection: http.client.HTTPConnection) -> float:
        begin = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        return time.perf_counter() - begin

    def idle_bytes(self, connections: int) -> float | None:
        """Resident bytes of a connection that sends nothing; None where /proc does not say who listens."""
        pid = self._listener()
        if pid is None:
            return None
        before = _resident(pid)
        with contextlib.ExitStack() as stack:
            for _ in range(connections):
                stack.enter_context(socket.create_connection((self._host, self._port), timeout=SECONDS))
            with contextlib.closing(self.connect()) as connection:  # after those before it
                self.health(connection)
            return (_resident(pid) - before) / connections

    def _listener(self) -> int | None:
        """The process that listens at the port, the first one if others have its socket, too."""
        port = f":{self._port:04X} "
        with contextlib.suppress(OSError):
            lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
            inodes = {line.split()[9] for line in lines if port in line[:60] and line.split()[3] == "0A"}
            for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
                with contextlib.suppress(OSError):
                    links = {os.readlink(link) for link in (folder / "fd").iterdir()}
                    if any(f"socket:[{inode}]" in links for inode in inodes):
                        return int(folder.name)
        return None


def _resident(pid: int) -> int:
    found = re.search(r"^VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _per_second(server: Server, clients: int, requests: int) -> float:
    def client(number: int) -> None:
        with contextlib.closing(server.connect()) as connection:
            for _ in range(number, requests, clients):
                server.ask(connection)

    with ThreadPoolExecutor(clients) as threads:
        begin = time.perf_counter()
        list(threads.map(client, range(clients)))
        return requests / (time.perf_counter() - begin)


def _round(server: Server, clients: int, requests: int) -> dict[str, float]:
    few = range(max(requests // clients, 3))
    with contextlib.closing(server.connect()) as connection:
        alone = [server.ask(connection) for _ in few]
        first = [server.ask(connection, stream=True) for _ in few]
        health = [server.health(connection) for _ in few]
    medians = {
        name: 1e3 * statistics.median(times) for name, times in ((ALONE, alone), (FIRST_BYTE, first), (HEALTH, health))
    }
    return {PER_SECOND: _per_second(server, clients, requests)} | medians


@click.command()
@click.argument("servers", nargs=-1, required=True, metavar="[NAME=]ADDRESS...")
@click.option("--clients", type=click.IntRange(1, 256), default=8, show_default=True, help="That ask at a time.")
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True, help="In a round, for each server.")
@click.option("--connections", type=click.IntRange(1, 10_000), default=200, show_default=True, help="That are idle.")
@repeats_option(9)
@click.option("--output", type=click.Path(path_type=Path), help="A file of JSON for all figures.")
def main(
    servers: tuple[str, ...], clients: int, requests: int, connections: int, repeats: int, output: Path | None
) -> None:
    """Measure running servers in turn."""
    measured = [Server(text) for text in servers]
    found: dict[str, dict[str, list[float]]] = {server.name: defaultdict(list) for server in measured}
    try:
        for server in measured:
            _round(server, clients, requests)  # warms up
            if (idle := server.idle_bytes(connections)) is not None:
                found[server.name][IDLE].append(idle / 1024)
        for turn in track(range(repeats), description="rounds", transient=True):
            for server in random.Random(turn).sample(measured, len(measured)):
                for name, figure in _round(server, clients, requests).items():
                    found[server.name][name].append(figure)
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(f"a server does not answer: {error or type(error).__name__}") from None
    columns = (PER_SECOND, ALONE, FIRST_BYTE, HEALTH, IDLE)
    rows = [[name, *(_shown(figures[column]) for column in columns)] for name, figures in found.items()]
    title = f"{clients} clients, {requests} requests of one token in each of {repeats} rounds, {connections} idle"
    results_console().print(table_of(title, ["server", *columns], rows))
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n")


def _shown(figures: list[float]) -> str:
    if len(figures) < 2:
        return "".join(f"{figure:.1f}" for figure in figures)
    return f"{statistics.median(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})"


if __name__ == "__main__":
    main()
