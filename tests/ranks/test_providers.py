"""The provider that connects the ranks: all ranks agree on it, and rank 0 prints it."""

import subprocess
import sys

import pytest


def test_one_host_is_quiet(run_ranks):
    """There was nothing to choose, so the program's output is its own."""
    for output in run_ranks("providers.py", 3):
        assert output == "soft: all ranks are on one host\n"


@pytest.mark.parametrize(
    ("ranks", "cables"),
    [
        (2, "1"),
        (3, "2"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, "1"), (2, "2"), (2, "3"), (3, "4"))),
    ],
)
def test_tcp_instead_of_shared_memory(run_ranks, ranks, cables):
    environment = {"MLXDIST_SOFT_TRANSPORT": "tcp", "MLXDIST_LINKS_PER_PEER": cables}
    outputs = run_ranks("providers.py", ranks, environment=environment)
    assert all("soft: all ranks are on one host" in output for output in outputs)
    printed = ["mlxdist: provider soft: all ranks are on one host" in output for output in outputs]
    assert printed == [True] + [False] * (ranks - 1)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("MLXDIST_PROVIDER=soft", "MLXDIST_PROVIDER is auto on rank 0 and soft on rank 2"),
        ("MLXDIST_SOFT_TRANSPORT=tcp", "MLXDIST_SOFT_TRANSPORT is auto on rank 0 and tcp on rank 2"),
        ("MLXDIST_SOFT_PROFILE=apple-tb5", "MLXDIST_SOFT_PROFILE is ideal on rank 0 and apple-tb5 on rank 2"),
        ("MLXDIST_LINKS_PER_PEER=2", "MLXDIST_LINKS_PER_PEER is 1 on rank 0 and 2 on rank 2"),
        ('MLXDIST_DEVICE_MAP=[[null, "a"], ["a", null]]', "MLXDIST_DEVICE_MAP is None on rank 0 and"),
    ],
)
def test_ranks_that_differ(run_ranks, setting, names):
    for output in run_ranks("providers.py", 3, setting, status=1):
        assert output.startswith("Mismatch: ranks have different settings: ") and names in output


@pytest.mark.parametrize("provider", ["ibverbs", "librdma"])
def test_a_provider_that_connects_no_ranks(run_ranks, provider):
    """A provider that the user names is used, or the job does not start."""
    for output in run_ranks("providers.py", 2, status=1, environment={"MLXDIST_PROVIDER": provider}):
        assert output.startswith("InvalidArgument: ") and f"cannot be connected by {provider}" in output


def test_a_device_that_is_not_there(run_ranks):
    environment = {"MLXDIST_PROVIDER": "ibverbs", "MLXDIST_DEVICE_MAP": '[[null, "none0"], ["none1", null]]'}
    for output in run_ranks("providers.py", 2, status=1, environment=environment):
        assert "has no device none0, which the device map names" in output


def test_reliable_connections_need_hardware(run_ranks):
    for output in run_ranks("providers.py", 2, status=1, environment={"MLXDIST_QP_TYPE": "rc"}):
        assert "provider soft has no reliable connections (MLXDIST_QP_TYPE=rc)" in output


def test_a_wrong_device_map_starts_nothing():
    setting = 'MLXDIST_DEVICE_MAP=[[null, "a"], [null, null]]'
    command = [sys.executable, "-m", "mlxdist", "launch", "-n", "2", "--env", setting]
    ended = subprocess.run([*command, "--", "echo", "started"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "started" not in ended.stdout
    assert "host 0 has a cable to host 1 (a), but host 1 has null in column 0" in ended.stderr


def test_the_launcher_passes_on_its_options(run_ranks):
    command = [sys.executable, "-m", "mlxdist", "launch", "-n", "1", *"--provider soft --qp-type rc -- env".split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "MLXDIST_PROVIDER=soft\n" in ended.stdout and "MLXDIST_QP_TYPE=rc\n" in ended.stdout
