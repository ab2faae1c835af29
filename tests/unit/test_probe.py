"""Probes of devices: the limits that they find, how long these are kept, and `mlxdist devices --probe`."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlxdist._native import lib
from node_infos import device
from softverbs_library import LIBRARY, linux

from mlxdist.runtime.devices.device import Device, list_devices
from mlxdist.runtime.devices.listing import list_apart
from mlxdist.runtime.devices.node_info import NodeInfo
from mlxdist.runtime.devices.probe import MESSAGE_SIZES, MOST, PeerProbe, Probe
from mlxdist.runtime.devices.probe_cache import keep_probes, with_probes
from mlxdist.runtime.devices.queue_pairs import usable

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
FOUND = Probe(uc=True, queue_pairs=3, queue_pair_errno=12, receives=4095, regions=100, region_bytes=0xFA0000)
WITH_A_PEER = PeerProbe(4096, receives=192, larger="LOC_LEN_ERR", packets=True, lengths=True)
UNRESTRICTED = {"queue_pairs": 16, "receives": 4095, "regions": 128, "region_bytes": 32 << 20}


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> dict[str, Path]:
    """Directories of this test alone, for what is kept and for jobs."""
    found = {"XDG_CACHE_HOME": tmp_path / "cache", "XDG_RUNTIME_DIR": tmp_path / "runtime", "HOME": tmp_path / "home"}
    for name, path in found.items():
        path.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(path))
    return found


def kept_file(places: dict[str, Path]) -> Path:
    if sys.platform == "darwin":
        return places["HOME"] / "Library" / "Caches" / "mlxdist" / "probes.json"
    return places["XDG_CACHE_HOME"] / "mlxdist" / "probes.json"


def run(*arguments: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlxdist", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done


# The limits. Profiles whose queue pairs all processes of the user share are in native/tests/probe_test.c.


@pytest.mark.parametrize(
    "profile, expected, remote",
    [
        ("ideal", UNRESTRICTED, True),
        ("rxe", UNRESTRICTED, True),
        ("apple-tb5-27", {"queue_pairs": 3, "receives": 4095, "regions": 100, "region_bytes": 0xFA0000}, False),
    ],
)
def test_limits_are_those_of_the_profile(profile, expected, remote):
    for found in list_devices("soft", profile, probe=True):
        assert found.probe is not None and (found.probe.error, found.probe.kept) == ("", 0)
        assert {name: getattr(found.probe, name) for name in expected} == expected
        assert (found.probe.uc, found.probe.rc, found.probe.inline_bytes) == (True, False, 0)
        assert (found.probe.region_local, found.probe.region_remote) == (True, remote)
        assert (found.probe.queue_pair_local, found.probe.queue_pair_remote) == (True, True)


def test_devices_are_not_probed_unless_requested():
    assert [found.probe for found in list_devices("soft")] == [None] * 4


def test_a_probe_leaves_nothing_open():
    list_devices("soft", probe=True)
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        list_devices("soft", probe=True)
    assert len(os.listdir("/dev/fd")) == before


def test_as_much_is_tried_as_the_header_says():
    names = {"inline_bytes": "INLINE"}
    assert {name: getattr(lib, f"MLXDIST_PROBE_{names.get(name, name.upper())}") for name in MOST} == MOST

    assert MESSAGE_SIZES[0] == lib.MLXDIST_PEER_PROBE_BYTES


def test_results_travel_as_json():
    for found in list_apart("soft", "apple-tb5-27", probe=True).devices:
        assert found.probe is not None and found.probe.queue_pairs == 3
        for peer_probe in (None, WITH_A_PEER):
            found = replace(found, peer_probe=peer_probe)
            assert Device.from_json(json.loads(json.dumps(found.to_json()))) == found
            (there,) = NodeInfo.unpack(NodeInfo(b"id", "host", devices=(found,)).pack()).devices
            assert (there.probe, there.peer_probe) == (found.probe, peer_probe)


def test_results_in_words():
    words = replace(FOUND, region_local=True, kept=2).in_words()
    assert words["queue pairs"] == "3, then ENOMEM" and words["connections"] == "UC"
    assert words["access flags of a region"] == "LOCAL_WRITE alone" and words["access flags of a queue pair"] == "none"
    assert words["not taken back"] == "2 objects"
    most = replace(FOUND, rc=True, queue_pairs=16, queue_pair_errno=0, regions=128).in_words()
    assert (most["connections"], most["queue pairs"], most["regions"]) == ("UC, RC", "16 or more", "128 or more")
    assert Probe(error="ibv_alloc_pd: x").in_words() == {"error": "ibv_alloc_pd: x"}


def test_results_with_a_peer_in_words():
    words = replace(WITH_A_PEER, lengths=False).in_words()
    assert words["bytes of a message"] == "4096; larger: LOC_LEN_ERR"
    assert words["a message longer than its receive"] == "goes on in the next one"
    assert (words["an empty message"], words["length in a completion"]) == ("is lost", "wrong")
    whole = PeerProbe(131072, receives=6, empty=True, lengths=True).in_words()
    assert whole["bytes of a message"] == "131072 or more" and "a message longer than its receive" not in whole
    assert (whole["receives of that size"], whole["an empty message"]) == ("6 or more", "arrives")
    refused = PeerProbe(4096, larger="LOC_LEN_ERR", longer="LOC_LEN_ERR").in_words()
    assert refused["a message longer than its receive"] == "LOC_LEN_ERR"


def test_what_is_missing_is_said_of_devices_that_do_not_say_it():
    missing = {"messages": "not found yet: start a job of two hosts"}
    card = probed()
    apple = replace(card, link_layer="Thunderbolt")
    assert card.found_in_words() == FOUND.in_words()
    assert apple.found_in_words() == FOUND.in_words() | missing
    assert replace(apple, peer_probe=WITH_A_PEER).found_in_words() == FOUND.in_words() | WITH_A_PEER.in_words()
    assert replace(apple, provider="soft").found_in_words() == FOUND.in_words()
    assert replace(apple, probe=None).found_in_words() == {}


# Kept results


def probed(name: str = "rdma_en2", **fields: Any) -> Device:
    usual: dict[str, Any] = {"provider": "librdma", "guid": "0001", "firmware": "1.0", "probe": FOUND}
    return replace(device(name), **usual | fields)


def read_again(*devices: Device) -> list[Probe | None]:
    return [found.probe for found in with_probes(replace(device, probe=None) for device in devices)]


def test_a_result_is_kept_for_its_device(places):
    assert keep_probes([probed(), probed("rdma_en3")]) == kept_file(places)
    assert kept_file(places).stat().st_mode & 0o777 == 0o600
    others = [probed(provider="ibverbs"), probed("rdma_en4"), probed(guid="0002"), probed(firmware="1.1")]
    assert read_again(probed(), probed("rdma_en3"), *others) == [FOUND, FOUND, None, None, None, None]


def test_a_later_result_replaces_that_of_its_device_alone():
    keep_probes([probed(), probed("rdma_en3")])
    later = replace(FOUND, queue_pairs=10)
    keep_probes([replace(probed(), probe=later)])
    assert read_again(probed(), probed("rdma_en3")) == [later, FOUND]


def test_results_with_and_without_a_peer_are_kept_beside_each_other():
    """Whichever comes first."""
    none: Any = {"probe": None}
    for first, second in (({"peer_probe": WITH_A_PEER} | none, {}), ({}, {"peer_probe": WITH_A_PEER} | none)):
        for name, fields in (("rdma_en2", first), ("rdma_en3", {}), ("rdma_en2", second)):
            keep_probes([probed(name, **fields)])
        both, other = with_probes([probed(**none), probed("rdma_en3", **none)])
        assert (both.probe, both.peer_probe, other.peer_probe) == (FOUND, WITH_A_PEER, None)
    now = replace(FOUND, queue_pairs=1)
    (device,) = with_probes([probed(probe=now)])  # what was probed now counts
    assert (device.probe, device.peer_probe) == (now, WITH_A_PEER)


def test_what_is_not_kept(places):
    failed = replace(probed(), probe=Probe(error="the port is not active"))
    assert keep_probes([failed, probed(provider="soft"), replace(probed(), probe=None)]) is None
    assert not kept_file(places).exists()


@pytest.mark.parametrize("field, value", [("boot", "another"), ("boot", ""), ("system", "Darwin 28"), ("schema", 1)])
def test_a_result_of_another_boot_driver_or_version_does_not_count(places, capfd, field, value):
    keep_probes([probed()])
    content = json.loads(kept_file(places).read_text())
    assert content[field] != value
    kept_file(places).write_text(json.dumps(content | {field: value}))
    assert read_again(probed()) == [None] and capfd.readouterr().err == ""
    keep_probes([probed("rdma_en3")])
    assert read_again(probed(), probed("rdma_en3")) == [None, FOUND]


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("{", "", "column"),
        ('"queue_pairs": 3', '"queue_pairs": 17', "queue_pairs is 17"),
        ('"queue_pairs": 3', '"queue_pairs": true', "queue_pairs is True"),
        ('"uc": true', '"uc": 1', "uc is 1"),
        ('"receives"', '"receive"', "receives is missing"),
        ('"rdma_en2"', '"rdma\\u001b[2J"', "must be a text"),
        ('"devices": [', '"devices": [7, ', "no list of 3"),
        ("}\n", "}" + " " * (1 << 18), "more than 262144 bytes"),
    ],
)
def test_a_damaged_file_has_no_result(places, capfd, old, new, why):
    keep_probes([probed()])
    text = kept_file(places).read_text()
    assert old in text
    kept_file(places).write_text(text.replace(old, new, 1) if old != "}\n" else text + new)
    assert read_again(probed()) == [None]
    warning = capfd.readouterr().err
    assert f"{kept_file(places)} is damaged: " in warning and why in warning and "devices --probe`" in warning
    keep_probes([probed()])
    assert read_again(probed()) == [FOUND]


# The command


def test_the_table_of_the_documentation():
    text = run("devices", "--provider", "soft", "--probe", MLXDIST_SOFT_PROFILE="apple-tb5-27").stdout
    table = text[text.index("Found by a probe") :]
    rows = [line for line in table.splitlines() if line.startswith("│ ")]
    assert len(rows) == 8
    assert "".join(f"    {row}\n" for row in rows) in PAGE.read_text()


def test_json():
    done = run("devices", "--provider", "soft", "--probe", "--json", MLXDIST_SOFT_PROFILE="apple-tb5-27")
    (soft,) = json.loads(done.stdout)["providers"]
    assert {found["probe"]["queue_pairs"] for found in soft["devices"]} == {3} and done.stderr == ""
    (soft,) = json.loads(run("devices", "--provider", "soft", "--json").stdout)["providers"]
    assert {found["probe"] for found in soft["devices"]} == {None}


def test_no_probe_while_a_job_runs():
    command = [sys.executable, "-m", "mlxdist", "devices", "--provider", "soft", "--probe"]
    done = run("launch", "-n", "1", "--", *command, status=1)
    assert "a probe takes every queue pair of a device for a moment" in done.stdout + done.stderr
    assert "Found by a probe" not in done.stdout


@linux
def test_ranks_plan_by_what_the_command_has_found(places, tmp_path, monkeypatch):
    """The library of the soft provider stands for the system's libibverbs, with devices of Thunderbolt."""
    (tmp_path / "libibverbs.so.1").symlink_to(LIBRARY)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("SOFTVERBS_PROFILE", "apple-tb5-27")

    def queue_pairs() -> set[tuple[bool, int | None]]:
        found = NodeInfo.unpack(NodeInfo.here(b"id", "host", provider="ibverbs").pack()).of_provider("ibverbs")
        return {(device.probe is not None, usable(device)) for device in found}

    assert queue_pairs() == {(False, 3)}
    done = run("devices", "--provider", "ibverbs", "--probe")
    assert f"What the probe has found is kept in {kept_file(places)} until this machine restarts." in done.stdout
    assert queue_pairs() == {(True, 3)}
    assert done.stdout.count("not found yet: start a job of two hosts") == 1  # the devices are alike
    # A later listing without a probe shows it, too.
    assert "3, then ENOMEM" in run("devices", "--provider", "ibverbs").stdout
    text = kept_file(places).read_text()
    kept_file(places).write_text(text.replace('"queue_pairs": 3', '"queue_pairs": 2'))
    assert queue_pairs() == {(True, 2)}


@linux
def test_a_cache_that_cannot_be_written(tmp_path):
    """The results are shown, and the note says why they are not kept."""
    (tmp_path / "libibverbs.so.1").symlink_to(LIBRARY)
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "libibverbs.so.1")}
    done = run("devices", "--provider", "ibverbs", "--probe", **variables)
    assert "What the probe has found is not kept: " in done.stdout and "Not a directory" in done.stdout
    assert "16 or more" in done.stdout
