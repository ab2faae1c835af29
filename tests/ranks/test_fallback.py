"""RDMA devices that were chosen and cannot be set up: with `auto` all ranks use TCP, a forced provider fails."""

import json
import re
import sys
from pathlib import Path

import pytest
from hosts import several_hosts, start_ranks
from native_build import NATIVE, build_program
from softverbs_library import LIBRARY, MAP

TESTS = Path(__file__).parents[1]
VERBS = {
    "open_device": 13,
    "alloc_pd": 0,
    "create_cq": 12,
    "create_qp": 16,
    "create_qp+1": 16,
    "reg_mr": 12,
    "modify_qp to INIT": 95,
    "modify_qp to RTR": 22,
    "modify_qp to RTR+1": 110,
    "modify_qp to RTS": 22,
    "post_recv": 12,
    "post_recv+33": 12,
}
# A host with RDMA devices, as far as may_have_devices() looks; the process that runs the rank is the one to fail.
WITH_DEVICES = 'mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/soft0 && FAILING_PID=$$ exec "$@"'


@pytest.fixture(scope="module")
def hosts():
    with several_hosts(4, late=False) as found:
        yield found


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The directory with the libibverbs.so.1 that fails."""
    if sys.platform != "linux":
        pytest.skip("libibverbs is Linux's")
    directory = tmp_path_factory.mktemp("lib")
    flags = [f'-DSOFTVERBS="{LIBRARY}"', "-D_GNU_SOURCE", f"-I{NATIVE / 'verbs'}", "-shared", "-fPIC"]
    flags += [f"-Wl,--version-script={MAP}"]
    libraries = ["-Wl,--no-as-needed", LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}"]
    build_program(directory / "libibverbs.so.1", [TESTS / "driver" / "failing_verbs.c"], flags, libraries=libraries)
    return directory


@pytest.fixture
def run(hosts, library):
    def run(
        ranks: int, failing: dict[int, str], script: str = "providers.py", **environment: str
    ) -> tuple[list[str], list[int]]:
        """What each rank, on a host of its own, printed, and its exit status. ``failing``: FAILING_VERB of some."""
        rows = [[None if a == b else "soft0" for b in range(ranks)] for a in range(ranks)]
        job = {
            "LD_LIBRARY_PATH": str(library),
            "MLXDIST_DEVICE_MAP": json.dumps(rows),
            "MLXDIST_FLIGHT_DIR": "none",
            "MLXDIST_TUNING_FILE": "none",
            "MLXDIST_TIMEOUT": "20",
        } | environment
        command = ["sh", "-c", WITH_DEVICES, "sh", sys.executable, TESTS / "rank_scripts" / script]
        of_ranks = [{"FAILING_VERB": failing.get(rank, "")} for rank in range(ranks)]
        with start_ranks(hosts[:ranks], *command, variables=job, of_ranks=of_ranks) as started:
            outputs = [rank.communicate(timeout=60)[0] for rank in started]
        return outputs, [rank.returncode for rank in started]

    return run


def check_given_back(outputs: list[str]) -> None:
    for output in outputs:
        assert "given back too early" not in output
        closed = re.findall(r"objects left: (\d+)", output)
        assert closed == ["0"] * output.count("device opened"), output


def test_nothing_fails(run):
    """What the others compare with: `auto` takes the library's devices."""
    outputs, statuses = run(2, {})
    assert statuses == [0, 0], outputs
    for output in outputs:
        assert "ibverbs: RDMA to other hosts by soft0\n" in output and "objects left: 0" in output
    assert [output.count("mlxdist: provider") for output in outputs] == [1, 0]
    check_given_back(outputs)


CORE = {(2, "one", "alloc_pd"), (3, "one", "modify_qp to RTR")}
CASES = [
    pytest.param(
        ranks,
        failing,
        verb,
        marks=[] if (ranks, failing, verb) in CORE else pytest.mark.long,
        id=f"{verb}-{failing} of {ranks}",
    )
    for ranks, failing, verbs in (
        (2, "one", ["alloc_pd"]),
        (2, "all", VERBS),
        (3, "one", VERBS),
        (4, "one", ["create_qp+1", "modify_qp to RTR+1"]),
    )
    for verb in verbs
]


def failures(ranks: int, failing: str, verb: str) -> dict[int, str]:
    return dict.fromkeys([ranks - 1] if failing == "one" else range(ranks), f"{verb}:{VERBS[verb]}")


@pytest.mark.parametrize(("ranks", "failing", "verb"), CASES)
def test_auto_falls_back(run, ranks, failing, verb):
    given = failures(ranks, failing, verb)
    outputs, statuses = run(ranks, given)
    assert statuses == [0] * ranks, outputs
    call = verb.split("+")[0]
    reason = rf"soft: ibverbs failed on rank {min(given)} on \S+: .*{call}.*; instead of RDMA ranks use shared memory"
    for rank, output in enumerate(outputs):
        assert re.search(f"^{reason}", output, re.M), output
        assert len(re.findall(f"^mlxdist: provider {reason}", output, re.M)) == (rank == 0), output
        assert output.count("mlxdist: provider") == (rank == 0), output
    check_given_back(outputs)


@pytest.mark.parametrize(("ranks", "failing", "verb"), [case for case in CASES if "all" not in case.values])
def test_a_forced_provider_fails(run, tmp_path, ranks, failing, verb):
    """The launcher learns which rank was the first, too."""
    given, first = failures(ranks, failing, verb), tmp_path / "first"
    outputs, statuses = run(ranks, given, MLXDIST_PROVIDER="ibverbs", MLXDIST_ERROR_FILE=str(first))
    assert statuses == [1] * ranks, outputs
    found = [re.findall(r"^(?:Resource|Transport)Error: .*", output, re.M) for output in outputs]
    assert len({tuple(errors) for errors in found}) == 1, outputs
    text = rf"Error: rank {min(given)} on \S+ could not connect: .*{verb.split('+')[0]}.* \[rank {min(given)} on \S+\]$"
    assert len(found[0]) == 1 and re.search(text, found[0][0]), outputs
    assert first.read_text() == str(min(given))
    check_given_back(outputs)


def test_the_start_takes_no_more_steps(run, run_ranks):
    """Outcomes travel with addresses, and with what was a barrier: only a failure costs a second round."""
    for output in run_ranks("start_steps.py", 2):
        assert output == "steps: hosts tuning addresses connect\n"
    outputs, _ = run(2, {1: "modify_qp to RTR:22"}, "start_steps.py")
    for output in outputs:
        assert "steps: hosts devices tuning addresses connect addresses connect\n" in output


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("MLXDIST_SOFT_TRANSPORT=shm", "connects ranks of one"),
        pytest.param("MLXDIST_QP_TYPE=rc", "has no reliable connections", marks=pytest.mark.long),
    ],
)
def test_the_next_one_fails_too(run, setting, text):
    """One error on all ranks, which names both."""
    outputs, statuses = run(2, {1: "create_qp:16"}, **dict([setting.split("=")]))
    assert statuses == [1, 1], outputs
    errors = [re.findall(r"^ResourceError: .*|^TransportError: .*", output, re.M) for output in outputs]
    assert errors[0] == errors[1] and len(errors[0]) == 1, outputs
    assert re.search(rf"ibverbs failed on rank [01] on .*create_qp.*; without RDMA: .*{text}", errors[0][0])
    assert not any("mlxdist: provider" in output for output in outputs)
    check_given_back(outputs)


@pytest.mark.parametrize("verb", [pytest.param("create_qp:16", marks=pytest.mark.long), "modify_qp to RTR:22"])
def test_later_it_is_too_late(run, verb):
    """In large worlds two ranks connect on first use, when the others may have sent much by RDMA."""
    outputs, statuses = run(2, {1: verb}, MLXDIST_ON_DEMAND_THRESHOLD="1")
    assert statuses == [1, 1], outputs
    for output in outputs:
        text = rf"{verb.split(':')[0]}.*too late for another provider: set MLXDIST_PROVIDER=soft"
        assert re.search(text, output), output
    check_given_back(outputs)


def test_devices_are_opened_at_the_start_in_any_world(run):
    outputs, statuses = run(2, {1: "alloc_pd:0"}, MLXDIST_ON_DEMAND_THRESHOLD="1")
    assert statuses == [0, 0] and all("soft: ibverbs failed on rank 1 on" in output for output in outputs), outputs
