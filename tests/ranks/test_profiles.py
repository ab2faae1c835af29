"""Every collective on the devices that the software provider plays, and over a connection that loses messages."""

import ast

import pytest
from test_collectives import OPERATIONS

DEVICES = {
    "apple-tb5": {"MLXDIST_SOFT_PROFILE": "apple-tb5"},
    "apple-tb5-27": {"MLXDIST_SOFT_PROFILE": "apple-tb5-27"},
    "lossy-apple-tb5-27": {"MLXDIST_SOFT_PROFILE": "apple-tb5-27", "MLXDIST_INJECT_FAULTS": "drop=1/100"},
    "apple-odd": {"MLXDIST_SOFT_PROFILE": "apple-odd"},
    "losing-apple-odd": {"MLXDIST_SOFT_PROFILE": "apple-odd", "MLXDIST_INJECT_FAULTS": "lose=1/300"},
    "rxe": {"MLXDIST_SOFT_PROFILE": "rxe"},
    "lossy": {"MLXDIST_INJECT_FAULTS": "drop=1/100"},
    "lossy-apple-tb5": {"MLXDIST_SOFT_PROFILE": "apple-tb5", "MLXDIST_INJECT_FAULTS": "drop=1/100"},
}


MATRIX = [("apple-tb5", 2), ("apple-tb5", 4), ("rxe", 3), ("lossy", 2), ("lossy", 4), ("lossy-apple-tb5", 3)]
MATRIX += [("apple-tb5-27", 2), ("apple-tb5-27", 4), ("lossy-apple-tb5-27", 3)]
MATRIX += [("apple-odd", 2), ("apple-odd", 3), ("losing-apple-odd", 2)]


@pytest.mark.long
@pytest.mark.parametrize(("device", "ranks"), MATRIX)
def test_matrix(run_ranks, device, ranks):
    """All operations in one job; the largest arrays are sent by test_collectives and test_large."""
    outputs = run_ranks("collectives.py", ranks, "every", timeout=300, environment=DEVICES[device])
    for operation in OPERATIONS:
        assert f"112 cases of {operation} on {ranks} ranks are exact" in outputs[0]


@pytest.mark.parametrize(
    ("profile", "ranks", "faults"),
    [
        pytest.param("apple-tb5", 2, "none", marks=pytest.mark.long),
        ("apple-tb5-27", 2, "none"),
        ("apple-odd", 2, "none"),
        pytest.param("apple-odd", 3, "drop=1/200,lose=1/500", marks=pytest.mark.long),
        pytest.param("rxe", 2, "none", marks=pytest.mark.long),
        ("apple-tb5", 2, "drop=1/100,duplicate=1/100,truncate=1/100,jitter=100"),
        pytest.param("rxe", 4, "drop=1/100,duplicate=1/100,truncate=1/100,jitter=100", marks=pytest.mark.long),
    ],
)
def test_every_collective(run_ranks, profile, ranks, faults):
    environment = {"MLXDIST_SOFT_PROFILE": profile}
    outputs = run_ranks("retransmission.py", ranks, faults, timeout=120, environment=environment)
    assert all("252 cases are exact" in output for output in outputs)


def counters(run_ranks, environment):
    outputs = [output.splitlines() for output in run_ranks("profiles.py", 2, environment=environment)]
    return [ast.literal_eval(lines[0]) for lines in outputs], {lines[1] for lines in outputs}


@pytest.mark.parametrize(
    ("profile", "provider"), [("ideal", "soft"), ("apple-tb5", "soft/apple-tb5"), ("rxe", "soft/rxe")]
)
def test_padding(run_ranks, profile, provider):
    """Where frames count, every SEND fills its slot; elsewhere nothing is padded. Nothing is dropped."""
    ranks, providers = counters(run_ranks, {"MLXDIST_SOFT_PROFILE": profile})
    assert providers == {provider}
    for rank in ranks:
        assert (rank["padding_bytes_sent"] > 0) == (profile == "apple-tb5")
        assert rank["provider_sent"] == rank["sent"] or rank["retransmissions"] > 0
        assert rank["provider_sent"] % 4096 == 0 or profile != "apple-tb5"
        assert rank["provider_dropped"] <= rank["control_messages_sent"]  # those a rank that is late may miss


def test_injected_into_any_program(run_ranks):
    """The program knows nothing of it, and both directions lose messages, not the same ones."""
    ranks, _ = counters(run_ranks, {"MLXDIST_INJECT_FAULTS": "drop=1/20"})
    assert all(rank["provider_dropped_by_fault"] > 3 for rank in ranks)
    none, _ = counters(run_ranks, {"MLXDIST_INJECT_FAULTS": "drop=1/20,none"})
    assert all(rank["provider_dropped_by_fault"] == 0 for rank in none)


def test_faults_that_do_not_exist(run_ranks):
    outputs = run_ranks("profiles.py", 2, environment={"MLXDIST_INJECT_FAULTS": "drip=1/20"}, status=None)
    assert any('knows no faults "drip=1/20"' in output for output in outputs)


def test_slots_that_do_not_fit_a_queue(run_ranks):
    slots = {"MLXDIST_BULK_SLOTS": "16", "MLXDIST_BULK_SLOT_BYTES": str(1 << 20)}
    outputs = run_ranks("profiles.py", 2, environment=slots | DEVICES["apple-tb5"], status=None)
    assert any("need 8192 frames in a queue, and device soft0 has 4095" in output for output in outputs)
