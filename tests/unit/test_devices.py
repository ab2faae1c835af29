"""The devices of a provider, through the C API and as `mlxdist devices` shows them."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlxdist._native import ffi, lib

from mlxdist.base.errors import ResourceError
from mlxdist.runtime.devices import listing
from mlxdist.runtime.devices.device import GID_TYPES, LIMITS, Device, Gid, list_devices, speed_of
from mlxdist.runtime.devices.listing import list_apart
from mlxdist.runtime.devices.node_info import NodeInfo

TESTS = Path(__file__).parents[1]
# Only soft is sure to be on the machine that runs the tests.
NO_RDMA = not Path("/sys/class/infiniband").is_dir() and sys.platform == "linux"


def ask(provider: str, profile: str = "ideal") -> tuple[int, Any]:
    devices = ffi.new("mlxdist_device[]", 16)
    return lib.mlxdist_devices(provider.encode(), profile.encode(), 0, devices, 16), devices


def last_error() -> str:
    return ffi.string(lib.mlxdist_last_error()).decode()


# The C API


def test_devices_of_the_software_provider():
    count, devices = ask("soft")
    assert count == 4 and [ffi.string(devices[i].name) for i in range(5)] == [*(b"soft%d" % i for i in range(4)), b""]
    for device in devices[0:4]:
        assert ffi.string(device.error) == b"" and device.state == 4 and device.ports == 1
        assert (device.active_mtu, device.max_mtu) == (4096, 4096)


def test_limits_are_those_of_the_profile():
    found = [ask("soft", name)[1] for name in ("ideal", "apple-tb5", "rxe")]
    ideal, apple, rxe = (devices[0] for devices in found)
    assert ideal.max_qp > apple.max_qp == 10 and apple.max_mr == 100
    assert apple.max_sge == 1 and apple.max_message == 4095 * 4096
    assert rxe.active_mtu == 1024 and rxe.max_message == 8 << 20


def test_every_device_has_an_address_in_memory():
    """It is found by its type; those of TCP are IPv4 addresses of this machine's interfaces."""
    for device in list_devices("soft"):
        assert [gid.type for gid in device.gids].count("memory") == 1
        for gid in device.gids:
            assert gid.type in ("memory", "TCP")
            if gid.type == "TCP":
                assert gid.ipv4 is not None and gid.interface and 0 <= gid.prefix <= 32
                assert gid.ipv4.is_loopback == gid.interface.startswith("lo")


@pytest.mark.parametrize("room", [0, 1, 4])
def test_no_more_devices_are_written_than_there_is_room_for(room):
    devices = ffi.new("mlxdist_device[]", 5)
    ffi.memmove(devices, b"\xaa" * ffi.sizeof(devices), ffi.sizeof(devices))
    assert lib.mlxdist_devices(b"soft", b"ideal", 0, devices, room) == 4
    rest = bytes(ffi.buffer(devices))[room * ffi.sizeof("mlxdist_device") :]
    assert rest == b"\xaa" * len(rest)


@pytest.mark.parametrize(
    "provider, profile, text", [("verbs", "ideal", "no provider verbs"), ("soft", "x", "profile x")]
)
def test_what_there_is_not(provider, profile, text):
    assert ask(provider, profile)[0] == -1 and text in last_error()
    with pytest.raises(ResourceError, match=text):
        list_devices(provider, profile)


def test_no_call_is_in_progress_afterwards():
    ask("soft")
    text = ffi.new("char[]", b"untouched" + b"\0" * 119)
    lib.mlxdist_devices_call(text, len(text))
    assert ffi.string(text) == b""


def test_listing_leaves_nothing_open():
    """Each device is closed, with its memory: a program may list as often as it likes."""
    ask("soft")
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        ask("soft")
    assert len(os.listdir("/dev/fd")) == before


def test_the_names_of_types_are_those_of_the_header():
    names = ["IB", "ROCE_V1", "ROCE_V2", "UNKNOWN", "MEMORY", "TCP"]
    assert [getattr(lib, f"MLXDIST_GID_{name}") for name in names] == list(range(len(GID_TYPES)))
    assert [name.upper().replace(" ", "_") for name in GID_TYPES] == names


# In Python


@pytest.mark.parametrize("width, speed, gigabits", [(1, 1, 2.5), (2, 32, 100), (2, 64, 200), (2, 128, 400), (4, 4, 80)])
def test_speeds(width, speed, gigabits):
    assert speed_of(width, speed) == gigabits
    assert speed_of(0, speed) is None and speed_of(width, 3) is None


def test_addresses_as_text():
    mapped = Gid(1, "RoCE v2", b"\0" * 10 + b"\xff\xff\x0a\0\0\x01", 24)
    assert str(mapped) == "10.0.0.1/24" and not mapped.is_link_local
    assert str(replace(mapped, prefix=None)) == "10.0.0.1"
    assert str(Gid(0, "IB", b"\xfe\x80" + b"\0" * 13 + b"\1")) == "fe80::1"
    assert Gid(2, "RoCE v2", b"\0" * 10 + b"\xff\xff\xa9\xfe\0\x01", 16).is_link_local


def test_devices_travel_as_json():
    for device in list_devices("soft"):
        assert Device.from_json(json.loads(json.dumps(device.to_json()))) == device
        assert set(device.limits) == set(LIMITS)


# In a process of its own


def as_python(monkeypatch, tmp_path, script: str) -> None:
    """What is started to list devices is this script."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_listing_apart_finds_the_same():
    found = list_apart("soft", "apple-tb5")
    assert found.error == "" and found.source == "mlxdist"
    assert found.devices[1].name == "soft1" and found.devices[0].limits["max_qp"] == 10
    assert "no provider verbs" in list_apart("verbs").error


def test_a_program_in_the_current_directory_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert list_apart("soft").error == ""


def test_a_driver_that_hangs(tmp_path, monkeypatch):
    as_python(monkeypatch, tmp_path, "exec sleep 600")
    monkeypatch.setattr(listing, "_MARGIN", 0.2)
    assert list_apart("soft", seconds=0.2).error == "listing the devices of soft has not ended after 0.4 s"


@pytest.mark.parametrize(
    "script, text",
    [
        ("kill -SEGV $$", r"crashed (SIGSEGV)"),
        ("echo problem >&2; exit 1", "failed: problem"),
        ("exit 0", "failed: it printed nothing"),
    ],
)
def test_a_driver_that_crashes(script, text, tmp_path, monkeypatch):
    as_python(monkeypatch, tmp_path, script)
    assert text in list_apart("soft").error


def test_python_that_cannot_be_started(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert list_apart("soft").error.endswith("to list the devices: No such file or directory")


# A library that misbehaves


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> dict[str, str]:
    """Variables by which `mlxdist devices` takes the library of tests/driver for the system's libibverbs."""
    compiler = shutil.which("cc")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    directory = tmp_path_factory.mktemp("driver")
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{TESTS.parent / 'native' / 'verbs'}", "-o", str(directory / "libibverbs.so.1")]
    subprocess.run([*command, str(TESTS / "driver" / "libibverbs.c")], check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(directory), "DRIVER_DEVICES": "rxe0=4,2,-,fe80::1,::ffff:10.255.0.1 rxe1=1,2"}


def ibverbs(driver: dict[str, str], *arguments: str, status: int = 0, **environment: str) -> dict[str, Any]:
    text = run("--provider", "ibverbs", "--json", *arguments, status=status, **driver | environment)
    return json.loads(text)["providers"][0]


def test_ports_and_addresses(driver):
    rxe0, rxe1 = ibverbs(driver, status=None)["devices"]
    assert (rxe0["name"], rxe0["state"], rxe0["link_layer"], rxe0["speed"]) == ("rxe0", "ACTIVE", "Ethernet", 100)
    assert (rxe0["active_mtu"], rxe0["max_mtu"], rxe0["firmware"]) == (1024, 4096, "1.2.3")
    assert [(gid["index"], gid["gid"], gid["ipv4"]) for gid in rxe0["gids"]] == [
        (1, "fe80::1", None),
        (2, "::ffff:10.255.0.1", "10.255.0.1"),
    ]
    assert (rxe1["state"], rxe1["gids"]) == ("DOWN", [])


def test_addresses_of_this_machines_interfaces(driver):
    (rxe0,) = ibverbs(driver, status=None, DRIVER_DEVICES="rxe0=4,2,::ffff:127.0.0.1")["devices"]
    assert (rxe0["gids"][0]["interface"], rxe0["gids"][0]["prefix"]) == ("lo", 8)


def test_what_is_wrong_and_what_to_do(driver):
    text = run(**driver)
    assert "port down: rxe1 is DOWN; plug in the cable" in text and "ok: rxe0 is ready" in text
    assert "no IPv4 GID: x has no IPv4 address" in run(**driver | {"DRIVER_DEVICES": "x=4,2,fe80::1"})
    assert "port down: ib0 is INIT; start a subnet manager" in run(**driver | {"DRIVER_DEVICES": "ib0=2,1,fe80::1"})


CALLS = ["get_device_list", "open_device", "query_port", "query_gid"]


@pytest.mark.parametrize("call", ["get_device_name", *(pytest.param(call, marks=pytest.mark.long) for call in CALLS)])
def test_a_call_that_does_not_return_is_named(driver, call):
    """Only in the list itself, and for a name that is not known yet, no device can be identified."""
    device = "" if call == "get_device_list" else "rxe0"
    found = ibverbs(driver, "--timeout", "0.5", status=1, DRIVER_FAILS=f"ibv_{call}:{device}:hang")
    where = "device 0 of the list" if call == "get_device_name" else device
    assert f"ibv_{call}({where}) of provider ibverbs has not returned for 0.5 s" in found["error"]
    assert not found["usable"]


def test_a_call_that_crashes(driver):
    found = ibverbs(driver, status=1, DRIVER_FAILS="ibv_open_device:rxe1:crash")
    assert found["error"].startswith("listing the devices of ibverbs crashed (SIGSEGV)")


@pytest.mark.parametrize("call", ["open_device", "query_device", "query_port"])
def test_a_device_that_refuses_is_listed_with_its_error(driver, call):
    found = ibverbs(driver, status=None, DRIVER_FAILS=f"ibv_{call}:rxe1:13")
    assert [d["error"] for d in found["devices"]] == ["", f"ibv_{call}: Permission denied (errno 13)"]
    assert "not permitted" in [finding["verdict"] for finding in found["findings"]]


@pytest.fixture
def places(tmp_path) -> dict[str, str]:
    """Directories of this test alone, for jobs and for what a probe finds."""
    return {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_port_that_is_down_is_not_probed(driver, places):
    """This driver crashes when a probe begins."""
    (down,) = ibverbs(driver, "--probe", status=1, DRIVER_DEVICES="rxe1=1,2", **places)["devices"]
    assert down["probe"]["error"] == "the port is not active"
    found = ibverbs(driver, "--probe", status=1, **places)
    assert found["error"] == "listing the devices of ibverbs crashed (SIGABRT): its driver is broken"


def test_a_device_that_refuses_a_probe(driver, places):
    found = ibverbs(driver, "--probe", status=None, DRIVER_FAILS="ibv_alloc_pd:rxe0:12", **places)
    assert found["devices"][0]["probe"]["error"] == "ibv_alloc_pd: Cannot allocate memory (errno 12)"
    assert not Path(places["XDG_CACHE_HOME"]).exists(), "nothing is kept"
    assert [device["probe"] for device in ibverbs(driver, status=None, **places)["devices"]] == [None, None]


def test_a_call_of_a_probe_that_does_not_return_is_named(driver, places):
    options = ("--probe", "--timeout", "0.5")
    found = ibverbs(driver, *options, status=1, DRIVER_FAILS="ibv_alloc_pd:rxe0:hang", **places)
    assert "ibv_alloc_pd(rxe0) of provider ibverbs has not returned for 0.5 s" in found["error"]


def test_a_library_that_cannot_list(driver):
    found = ibverbs(driver, status=1, DRIVER_FAILS="ibv_get_device_list::12")
    assert found["error"] == "ibv_get_device_list of provider ibverbs failed: Cannot allocate memory (errno 12)"


def test_the_devices_of_a_rank(driver, monkeypatch):
    for name, value in driver.items():
        monkeypatch.setenv(name, value)
    node = NodeInfo.here(b"identity", "host", provider="ibverbs")
    assert [device.is_active for device in node.of_provider("ibverbs")] == [True, False] and node.missing == ""
    monkeypatch.setenv("DRIVER_DEVICES", "")
    assert NodeInfo.here(b"identity", "host", provider="ibverbs").missing.startswith("ibverbs lists no device: ")


# The command


def run(*arguments: str, status: int | None = 0, **environment: str) -> str:
    """``status``: None for any."""
    done = subprocess.run(
        [sys.executable, "-m", "mlxdist", "devices", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )
    assert status in (None, done.returncode), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_tables():
    text = run("--provider", "soft")
    assert "\x1b" not in text
    for word in ("soft0", "ACTIVE", "memory", "max_qp", "Ports", "Addresses (GIDs)", "Limits"):
        assert word in text


def test_json():
    (soft,) = json.loads(run("--provider", "soft", "--json", MLXDIST_SOFT_PROFILE="apple-tb5"))["providers"]
    assert (soft["provider"], soft["listed_by"], soft["error"], soft["usable"]) == ("soft", "mlxdist", "", True)
    assert [device["name"] for device in soft["devices"]][:2] == ["soft0", "soft1"]
    assert soft["devices"][0]["limits"]["max_qp"] == 10
    both = json.loads(run("--provider", "all", "--json"))
    assert [found["provider"] for found in both["providers"]][1:] == ["soft"]
    assert both["machine"]["system"] in ("Linux", "Darwin")


@pytest.mark.skipif(not NO_RDMA, reason="this machine has RDMA, or is a Mac")
def test_a_machine_without_rdma():
    """Nothing is wrong unless RDMA was asked for by name."""
    for text in (run(), run("--provider", "ibverbs", status=1)):
        assert "no kernel RDMA" in text and "modprobe rdma_rxe" in text
        assert "shared memory within a host and TCP between hosts" in text
    assert not json.loads(run("--provider", "ibverbs", "--json", status=1))["providers"][0]["usable"]
    assert "soft0" in run("--provider", "all")
    page = (TESTS.parent / "docs" / "devices.md").read_text()
    shown = "".join(line for line in run().splitlines(True) if not line.startswith("library fails"))
    assert "    $ mlxdist devices\n" + textwrap.indent(shown, "    ") in page


def test_the_tables_of_the_documentation():
    """Its columns; their width depends on the names of interfaces."""
    page = (TESTS.parent / "docs" / "devices.md").read_text()
    columns = [re.search(r"^ *┃ device.*", text, re.MULTILINE)[0].split() for text in (page, run("--provider", "soft"))]
    assert columns[0] == columns[1]


def test_a_variable_that_is_wrong():
    assert "Error: MLXDIST_SOFT_PROFILE" in run(status=2, MLXDIST_SOFT_PROFILE="x")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_terminals(columns):
    """Tables fit, with colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "mlxdist", "devices", "--provider", "soft"]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        output = b""
        try:
            while data := os.read(master, 65536):
                output += data
        except OSError:  # EIO: the other end is closed
            pass
        finally:
            os.close(master)
        assert process.wait(60) == 0
    text = output.decode()
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= columns
