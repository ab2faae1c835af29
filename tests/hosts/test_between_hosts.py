"""Ranks on different hosts, without RDMA: by TCP, over a good network and over one that is late and loses packets."""

import subprocess
import sys
from pathlib import Path

import pytest
from hosts import start_ranks, two_hosts
from native_build import NATIVE, build_program, layer_sources
from waiting import late

pytestmark = pytest.mark.long

RANKS = Path(__file__).parents[1] / "rank_scripts"
BY_TCP = {"MLXDIST_SOFT_TRANSPORT": "tcp"}  # the namespaces share a kernel, and could share memory


@pytest.fixture(params=["good", "late"])
def hosts(request):
    with two_hosts(late=request.param == "late") as pair:
        yield pair


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    sources = [NATIVE / "tests" / f"{name}.c" for name in ("soft_host", "soft_side", "soft_stream")]
    directory = tmp_path_factory.mktemp("native")
    return build_program(directory / "soft_host", sources + layer_sources("providers"), ["-O2"])


def test_messages(hosts, program):
    """A stream in each direction at once, below everything that repeats messages: none is lost, none out of order."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    sides = [subprocess.Popen(host.command(program, host.address, 4000), **pipes) for host in hosts]
    try:
        for _ in range(3):
            lines = [side.stdout.readline() for side in sides]
            for side, line in zip(sides, reversed(lines)):
                side.stdin.write(line)
                side.stdin.flush()
        for side in sides:
            _, errors = side.communicate(timeout=60)
            assert side.returncode == 0, errors
    finally:
        for side in sides:
            side.kill()
            side.wait()


def finish(started):
    """What they print from now on."""
    outputs = [rank.communicate(timeout=240)[0] for rank in started]
    for rank, output in zip(started, outputs):
        assert rank.returncode == 0, output
    return outputs


def test_collectives(hosts):
    """Every collective, exact to the bit."""
    with start_ranks(hosts, sys.executable, RANKS / "collectives.py", "every", variables=BY_TCP) as started:
        outputs = finish(started)
    assert "are exact" in outputs[0]
    assert all(host.received_bytes() > 100e6 for host in hosts), "they went by another way"


SUMS = """
import numpy as np
import mlxdist
group = mlxdist.init()
x = np.arange(100_000, dtype=np.float32)
for n in range(400):
    if n % 50 == 0:
        print(n, flush=True)
    assert (mlxdist.all_reduce(x + n) == 2 * (x + n)).all(), n
print("exact")
"""


def test_cable_is_pulled_for_a_moment(hosts):
    """Lost messages are retransmitted over the same connections or over new ones."""
    with start_ranks(hosts, sys.executable, "-c", SUMS, variables=BY_TCP) as started:
        for line in started[0].stdout:
            if line.strip() in ("50", "200"):
                hosts[line.strip() == "200"].pull_cable()
                late(0.5)
                hosts[line.strip() == "200"].plug_cable()
            if line.strip() == "350":
                break
        assert all(output.rstrip().endswith("exact") for output in finish(started))
