"""First contact with Thunderbolt devices: what messages do is found once, kept, and decides how large slots are.

The library of the software provider stands for the system's libibverbs, with devices that do not say it.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from softverbs_library import LIBRARY

from mlxdist.runtime.devices.probe import PeerProbe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libibverbs is Linux's")
TRIED = re.compile(r"probe with rank (\d) by device (soft\d+), messages of (\d+) bytes: (.*)")
SLOTS = re.compile(r"(\d+) bulk slots of (\d+) bytes")
MATRIX = [("apple-tb5", 2, 1), ("apple-tb5-27", 3, 2)]
LONG = [("apple-tb5", 3, 2), ("apple-tb5-27", 2, 1)]
LONG += [(profile, ranks, links) for profile, _, _ in MATRIX for ranks, links in ((2, 4), (4, 1), (2, 3), (3, 1))]
WHOLE = PeerProbe(131072, receives=6, empty=True, lengths=True)
FRAMES = PeerProbe(4096, receives=192, larger="LOC_LEN_ERR", packets=True, lengths=True)
ROUNDS = [131072, 65536, 16384, 8192, 4096]


def cables(ranks: int, links: int) -> list[list[list[str] | None]]:
    """A device map in which each end of each cable is a device of its own."""
    rows: list[list[list[str] | None]] = [[None] * ranks for _ in range(ranks)]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    for number, (a, b) in enumerate(pairs):
        rows[a][b] = [f"soft{number * links + link}" for link in range(links)]
    return rows


@pytest.fixture
def run(run_ranks, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libibverbs.so.1").symlink_to(LIBRARY)

    def run(profile: str, ranks: int, links: int, *args: object, status: int | None = 0, **variables: str) -> list[str]:
        environment = {
            "LD_LIBRARY_PATH": str(tmp_path / "lib"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "SOFTVERBS_PROFILE": profile,
            "MLXDIST_PROVIDER": "ibverbs",
            "MLXDIST_DEVICE_MAP": json.dumps(cables(ranks, links)),
            "MLXDIST_DEBUG": "info:connection",
        }
        return run_ranks("first_contact.py", ranks, *args, status=status, environment=environment | variables)

    return run


@pytest.fixture
def kept(tmp_path):
    file: Path = tmp_path / "cache" / "mlxdist" / "probes.json"

    def kept() -> dict[str, PeerProbe]:
        rows = json.loads(file.read_text())["devices"] if file.exists() else []
        return {key[1]: PeerProbe(**result) for key, _, result in rows}

    return kept


def sizes(output: str) -> list[int]:
    return list(dict.fromkeys(int(size) for _, _, size, _ in TRIED.findall(output)))


def slot(output: str) -> int:
    return int(SLOTS.findall(output)[-1][1]) if SLOTS.search(output) else 131072


def messages(output: str) -> int:
    """How many of the device the sum of the script took."""
    (found,) = re.findall(r"^messages (\d+)$", output, re.MULTILINE)
    return int(found)


@pytest.mark.parametrize(
    ("profile", "ranks", "links"), [*MATRIX, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_what_a_profile_enforces_is_found_once(run, kept, profile, ranks, links):
    expected = FRAMES if profile == "apple-tb5-27" else WHOLE
    first = run(profile, ranks, links)
    assert {name for output in first for _, name, _, _ in TRIED.findall(output)} == set(kept())
    assert len(kept()) == ranks * (ranks - 1) * links
    assert set(kept().values()) == {expected}, kept()
    for output in first:
        assert sizes(output) == (ROUNDS if expected is FRAMES else ROUNDS[:1])
        assert slot(output) == expected.largest
    again = run(profile, ranks, links)
    assert not any(map(TRIED.search, again)) and [slot(output) for output in again] == [expected.largest] * ranks


def test_ranks_that_connect_on_first_use(run, kept):
    """Slots are chosen at the start, so it is found then, too."""
    for output in run("apple-tb5-27", 3, 1, MLXDIST_ON_DEMAND_THRESHOLD="1"):
        assert slot(output) == 4096 and sizes(output) == ROUNDS
    assert set(kept().values()) == {FRAMES}


@pytest.mark.long
def test_devices_that_say_it_are_not_tried(run, kept):
    """A network card's: not a queue pair more, counted. Nor is a device that was tried before."""
    calls = {"MLXDIST_DEBUG": "trace:verbs"}
    counts = [run(profile, 2, 1, **calls) for profile in ("ideal", "apple-tb5", "apple-tb5")]
    assert [[output.count(": create_qp(") for output in outputs] for outputs in counts] == [[2, 2], [4, 4], [2, 2]]
    assert len(kept()) == 2


@pytest.mark.long
def test_what_was_kept_counts(run, kept, tmp_path):
    """The least of a job's cables decides, and a device without a result is tried again with its peer."""
    before = run("apple-tb5", 3, 1)
    file = tmp_path / "cache" / "mlxdist" / "probes.json"
    content = json.loads(file.read_text())
    content["devices"][4][2]["largest"] = 16384
    file.write_text(json.dumps(content))
    outputs = run("apple-tb5", 3, 1)
    assert [slot(output) for output in outputs] == [16384] * 3 and not any(map(TRIED.search, outputs))
    assert all(messages(small) > 4 * messages(large) for small, large in zip(outputs, before)), outputs
    del content["devices"][4]
    file.write_text(json.dumps(content))
    outputs = run("apple-tb5", 3, 1)
    assert [slot(output) for output in outputs] == [131072] * 3
    assert len({name for output in outputs for _, name, _, _ in TRIED.findall(output)}) == 2
    assert len(kept()) == 6 and set(kept().values()) == {WHOLE}


@pytest.mark.parametrize(
    ("profile", "faults"),
    [
        ("apple-tb5", "seed=5,error=1/40,drop=1/20"),
        pytest.param("apple-tb5", "drop=1/3", marks=pytest.mark.long),
        pytest.param("apple-tb5-27", "drop=1/3", marks=pytest.mark.long),
    ],
)
def test_messages_of_the_probe_are_lost(run, kept, profile, faults):
    """Slots may become smaller than they could be. Sums are right, and all ranks agree."""
    outputs = run(profile, 2, 2, SOFTVERBS_FAULTS=faults)
    sizes = {slot(output) for output in outputs}
    assert len(sizes) == 1 and sizes.pop() in (ROUNDS[-1:] if profile == "apple-tb5-27" else ROUNDS)


def test_no_message_arrives(run, kept):
    """The job goes on with messages of a frame, and says so once; nothing is kept."""
    outputs = run("apple-tb5", 2, 1, "drop_next=25")
    assert [slot(output) for output in outputs] == [4096] * 2 and kept() == {}
    warning = "the probe of devices with their peers fails: no message arrives; messages have 4096 bytes"
    assert [output.count(warning) for output in outputs] == [1, 0]


def test_a_device_that_cannot_be_connected(run, kept):
    """The error is that of the group's own start, which says what to do."""
    outputs = run("apple-tb5", 2, 1, status=None, SOFTVERBS_FAULTS="bridge=on")
    assert outputs[0].count("the probe of devices with their peers fails: ") == 1 and kept() == {}
    assert all("ResourceError" in output or "TransportError" in output for output in outputs), outputs
    assert all("modify_qp to RTR on the eager queue pair" in output for output in outputs), outputs


@pytest.mark.parametrize(
    ("ranks", "message"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, 9), (4, 12)))]
)
def test_a_rank_dies_while_messages_are_tried(run, kept, ranks, message):
    outputs = run("apple-tb5-27", ranks, 1, f"die_after={message}", status=None)
    for output in outputs[:-1]:
        assert re.search(rf"PeerLost: .*rank {ranks - 1}", output), outputs
    assert kept() == {}
    run("apple-tb5-27", ranks, 1)  # three queue pairs a device: what was left there would be missing here
    assert set(kept().values()) == {FRAMES}


def test_a_cache_that_cannot_be_written(run, tmp_path):
    """Nothing is tried, since it would be at every start."""
    outputs = run("apple-tb5", 2, 1, XDG_CACHE_HOME=str(tmp_path / "lib" / "libibverbs.so.1"))
    assert outputs[0].count("/mlxdist cannot be made: Not a directory; messages have 4096 bytes") == 1
    assert not any(map(TRIED.search, outputs)) and [slot(output) for output in outputs] == [4096] * 2
