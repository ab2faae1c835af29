"""RDMA over Thunderbolt, played: what a device gave is given back in order, however a rank ends.

What breaks one of the device's rules is refused, so that a job works is a test of all of them (docs/thunderbolt.md).
"""

import os
import re

import pytest

from mlxdist.runtime.devices.device import port_remedy

CLOSED = re.compile(
    r"device (soft\d+) is closed: first its queue pairs \((\d+)\), then regions \((\d+)\), "
    r"completion queue and domain; refused: (\d+)"
)
DEBUG = {"MLXDIST_DEBUG": "info:connection"}


def closed_devices(output: str) -> dict[str, tuple[str, ...]]:
    return {device: rest for device, *rest in CLOSED.findall(output)}


def run(
    run_ranks, ranks: int, how: str, status: int | None, profile: str = "apple-tb5", **environment: str
) -> list[str]:
    variables = DEBUG | {"MLXDIST_SOFT_PROFILE": profile} | environment
    outputs = run_ranks("thunderbolt.py", ranks, how, status=status, environment=variables)
    assert all("summed" in output for output in outputs)
    return outputs


def check_closed(output: str, devices: int) -> None:
    """Each device had the two queue pairs of one peer, and one region for their slots."""
    closed = closed_devices(output)
    assert closed == {f"soft{i}": ["2", "1", "0"] for i in range(devices)}, output


@pytest.mark.parametrize(
    ("ranks", "profile", "cables"),
    [
        (2, "apple-tb5", 1),
        (3, "apple-tb5-26.2", 1),
        (2, "apple-tb5-27", 1),
        pytest.param(4, "apple-tb5", 1, marks=pytest.mark.long),
        pytest.param(3, "apple-tb5", 2, marks=pytest.mark.long),
        pytest.param(2, "apple-tb5-27", 3, marks=pytest.mark.long),
        pytest.param(3, "apple-tb5", 4, marks=pytest.mark.long),
    ],
)
def test_a_device_for_each_peer_and_cable(run_ranks, ranks, profile, cables):
    for output in run(run_ranks, ranks, "returns", 0, profile, MLXDIST_LINKS_PER_PEER=str(cables)):
        check_closed(output, cables * (ranks - 1))


@pytest.mark.parametrize(
    ("how", "status"),
    [("SIGTERM", 143), *(pytest.param(how, None, marks=pytest.mark.long) for how in ("SIGINT", "exception"))],
)
def test_orderly_ends_release_everything(run_ranks, how, status):
    for output in run(run_ranks, 3, how, status):
        check_closed(output, 2)


@pytest.mark.parametrize("how", [pytest.param("_exit", marks=pytest.mark.long), "SIGKILL"])
def test_sudden_endings_leave_nothing_to_the_others(run_ranks, how):
    """The rank itself can give back nothing; the system does, and the others do as ever."""
    outputs = run(run_ranks, 3, how, None)
    assert not closed_devices(outputs[1])
    for rank in (0, 2):
        check_closed(outputs[rank], 2)
    run(run_ranks, 3, "returns", 0)  # ten queue pairs a device: what was left there would be missing here


def test_signs_of_life(run_ranks):
    """Queue pairs that fall silent in a fifth of a second, and a pause of a whole one."""
    environment = {
        "MLXDIST_SOFT_PROFILE": "apple-tb5",
        "MLXDIST_KEEPALIVE": "0.02",
        "MLXDIST_INJECT_FAULTS": "idle=500",
    }
    outputs = run_ranks("pause.py", 2, 1.5, environment=environment)
    assert all(output.startswith("0 re-created, 0 lost") for output in outputs)


@pytest.mark.parametrize("on_first_use", [{}, {"MLXDIST_ON_DEMAND_THRESHOLD": "1"}])
def test_a_port_in_a_bridge(run_ranks, on_first_use):
    """Every rank says what the error number means, in the words that `mlxdist doctor` has for it."""
    environment = {"MLXDIST_SOFT_PROFILE": "apple-odd", "MLXDIST_INJECT_FAULTS": "bridge=on"} | on_first_use
    outputs = run_ranks("thunderbolt.py", 2, "returns", status=None, environment=environment)
    assert all("modify_qp to RTR on the eager queue pair of rank" in output for output in outputs), outputs
    assert all(port_remedy() in output for output in outputs), outputs
    assert not any("MLXDIST_PROVIDER=soft" in output for output in outputs), outputs  # it is what they use


@pytest.mark.long
def test_domains_of_killed_ranks(run_ranks, tmp_path):
    """A killed rank leaves its protection domain; the eleventh time the next job says what that means."""
    leaked = f"mlxdist-{os.getuid()}-domain-soft0-1"
    environment = {"MLXDIST_SOFT_PROFILE": "apple-odd", "XDG_RUNTIME_DIR": str(tmp_path)}
    run_ranks("thunderbolt.py", 2, "SIGKILL", status=None, environment=environment)
    assert [file.name for file in tmp_path.glob("mlxdist-*-domain-*")] == [f"{leaked}-0"]
    for n in range(1, 11):
        (tmp_path / f"{leaked}-{n}").touch()
    outputs = run_ranks("thunderbolt.py", 2, "returns", status=None, environment=environment)
    assert all("device soft0 of provider soft/apple-odd: alloc_pd failed: " in output for output in outputs), outputs
    assert all("`ioclasscount AppleThunderboltRDMAProtectionDomain`" in output for output in outputs), outputs
    for file in tmp_path.glob("mlxdist-*-domain-*"):
        file.unlink()
    run_ranks("thunderbolt.py", 2, "returns", environment=environment)
    assert not list(tmp_path.glob("mlxdist-*-domain-*"))
