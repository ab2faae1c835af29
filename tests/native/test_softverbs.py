"""libsoftverbs: programs written against <infiniband/verbs.h> run on the software provider, unchanged."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, build_program, directory_sources, layer_sources, run_program
from softverbs_library import LIBRARY, MAP, linux
from waiting import wait_for

PROGRAMS = ["objects", "messages", "writes", "processes"]
LINKED = [LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}"]


def sources(program: str) -> list[Path]:
    return [NATIVE / "tests" / f"softverbs_{program}_test.c", NATIVE / "tests" / "softverbs_end.c"]


@pytest.fixture(scope="session")
def own_header(tmp_path_factory) -> list[str]:
    """Compiler flags that make mlxdist's own declarations <infiniband/verbs.h>: no package is needed."""
    directory = tmp_path_factory.mktemp("include")
    (directory / "infiniband").mkdir()
    (directory / "infiniband" / "verbs.h").write_text(f'#include "{NATIVE}/bindings/softverbs/softverbs.h"\n')
    return [f"-I{directory}"]


@pytest.fixture(scope="session")
def system_header() -> list[str]:
    """As on any machine with libibverbs-dev."""
    test = subprocess.run(
        ["cc", "-E", "-"], input="#include <infiniband/verbs.h>\n", capture_output=True, text=True, timeout=60
    )
    if test.returncode:
        pytest.skip("there is no <infiniband/verbs.h>: apt-get install libibverbs-dev")
    return []


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(tmp_path, own_header, program):
    """Linked with the installed library."""
    run_program(build_program(tmp_path / program, sources(program), own_header, libraries=LINKED))


@pytest.mark.sanitize
@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_sanitized(tmp_path, own_header, program):
    parts = [*sources(program), *layer_sources("providers"), *directory_sources("bindings/softverbs")]
    run_program(build_program(tmp_path / program, parts, [*SANITIZE_MEMORY, *own_header]))


@pytest.mark.long
def test_segments_of_macos(tmp_path, own_header):
    """Here too: memory that has a name until it is mapped."""
    parts = [*sources("objects"), *layer_sources("providers", "posix"), *directory_sources("bindings/softverbs")]
    run_program(build_program(tmp_path / "objects", parts, own_header))


@pytest.fixture(scope="session")
def library_directory(tmp_path_factory) -> Path:
    """A directory in which libsoftverbs is what programs ask for."""
    directory = tmp_path_factory.mktemp("lib")
    (directory / "libibverbs.so.1").symlink_to(LIBRARY)
    return directory


@linux
@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", ["preloaded", "in_its_place"])
def test_program_of_another_project(tmp_path, system_header, library_directory, way, program):
    """Compiled with the system's header and linked with -libverbs, as its author would."""
    built = build_program(tmp_path / program, sources(program), system_header, libraries=["-libverbs"])
    environment = {"LD_PRELOAD": str(LIBRARY)} if way == "preloaded" else {"LD_LIBRARY_PATH": str(library_directory)}
    run_program(built, environment=environment)


def exported(library: Path | str) -> dict[str, str]:
    """Name: its version, where there are versions; of several the default one."""
    output = subprocess.run(
        ["nm", "-gU", library] if sys.platform == "darwin" else ["nm", "-D", "--defined-only", library],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    symbols = [line.split()[-1] for line in output.splitlines() if " A " not in line]
    if sys.platform == "darwin":
        return {symbol.removeprefix("_"): "" for symbol in symbols}
    return dict(symbol.split("@@") for symbol in symbols if "@@" in symbol)


def find_program(name: str) -> str:
    package = "ibverbs-utils" if name.startswith("ibv_") else "perftest"
    return shutil.which(name) or pytest.skip(f"there is no {name}: apt-get install {package}")


def wait_for_server(process: subprocess.Popen, port: int) -> None:
    """Until the port is listened at; a connection would be taken for the client's."""
    listener = re.compile(rf":{port:04X} [0-9A-F]+:0000 0A ")
    files = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    assert wait_for(lambda: process.poll() is not None or any(listener.search(file.read_text()) for file in files))
    assert process.poll() is None, process.communicate()[0]


def run_pair(name: str, *arguments: str, profile: str = "ideal") -> list[tuple[int, str]]:
    """Exit status and output of a program's server and of its client."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [find_program(name), "-d", "soft0", "-p", str(port), "-s", "4096", *arguments]
    environment = os.environ | {"LD_PRELOAD": str(LIBRARY), "SOFTVERBS_PROFILE": profile}
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **options) as server:
        try:
            wait_for_server(server, port)
            client = subprocess.run([*command, "127.0.0.1"], **options, timeout=60)
            output, _ = server.communicate(timeout=60)
        finally:
            server.kill()
    return [(server.returncode, output), (client.returncode, client.stdout)]


@linux
@pytest.mark.long
def test_ibv_devinfo():
    """A table of addresses as a RoCE device has it."""
    shown = subprocess.run(
        [find_program("ibv_devinfo"), "-v", "-d", "soft1"],
        env=os.environ | {"LD_PRELOAD": str(LIBRARY)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    addresses = re.findall(r"GID\[ *(\d)\]:\s+(\S+), (RoCE v\d)", shown.stdout)
    assert [(index, kind) for index, _, kind in addresses] == [("0", "RoCE v1"), ("1", "RoCE v2")]
    assert addresses[0][1].startswith("fe80:") and addresses[1][1].startswith("::ffff:")


@linux
@pytest.mark.long
@pytest.mark.parametrize("index", ["0", "1"])
def test_ibv_uc_pingpong(index):
    """It checks what it receives."""
    for status, output in run_pair("ibv_uc_pingpong", "-g", index, "-n", "20", "-c"):
        assert status == 0 and "20 iters in" in output and "invalid data" not in output, output


PERFTEST = ["ib_send_lat", "ib_send_bw", "ib_write_lat", "ib_write_bw"]
MEASURED = re.compile(r"^ *4096 +20 +\d", re.M)


@linux
@pytest.mark.long
@pytest.mark.parametrize("index", [(), ("-x", "0")], ids=["own_choice", "first_address"])
@pytest.mark.parametrize("name", PERFTEST)
def test_perftest(name, index):
    for status, output in run_pair(name, "-c", "UC", "-F", "-n", "20", *index):
        assert status == 0 and MEASURED.search(output), output


@linux
@pytest.mark.long
def test_perftest_on_thunderbolt():
    """It keeps to Apple's rules until its end, where it destroys completion queues before regions.

    The link layer of Thunderbolt is none that perftest knows, so it is told another one.
    """
    options = ["-c", "UC", "-F", "-n", "20", "--force-link=Ethernet"]
    for status, output in run_pair("ib_send_lat", *options, profile="apple-tb5"):
        assert MEASURED.search(output), output
        assert status == 0 or "Failed to destroy CQ - Device or resource busy" in output, output


@linux
def test_the_page_gives_the_path_of_the_library():
    page = (NATIVE.parent / "docs" / "softverbs.md").read_text()
    command = re.search(r"^    (lib=.*)$", page, re.M)[1].replace("python", sys.executable)
    shown = subprocess.run([f"{command}; echo $lib"], shell=True, capture_output=True, text=True, timeout=60).stdout
    assert Path(shown.strip()) == LIBRARY and LIBRARY.exists()


@linux
def test_exports_the_symbols_of_its_map():
    """All that the map names is there, under that version, and nothing else is visible."""
    wanted = {}
    nodes = re.findall(r"^(\w+(?:\.\d+)?) \{\n  global:\n(.*?)(?:  local|\})", MAP.read_text(), re.M | re.S)
    for version, names in nodes:
        wanted |= dict.fromkeys(re.findall(r"(\w+);", names), version)
    assert len(wanted) > 60
    assert exported(LIBRARY) == wanted


def test_exports_what_its_header_declares():
    directory = NATIVE / "bindings/softverbs"
    declared = re.findall(r"\b(_?ibv_\w+|softverbs_\w+|\w+_to_ibv_rate)\(", (directory / "softverbs.h").read_text())
    refused = re.findall(r"^N\w+\((ibv_\w+)", (directory / "unsupported.c").read_text(), re.M)
    assert set(exported(LIBRARY)) == {*declared, *refused}


@linux
@pytest.mark.long
def test_versions_are_those_of_libibverbs():
    """A program that was linked with the one finds its names in the other."""
    libraries = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"libibverbs\.so\.1 .*=> (\S+)", libraries)
    if not found:
        pytest.skip("there is no libibverbs.so.1: apt-get install libibverbs1")
    theirs = exported(found[1])
    ours = exported(LIBRARY)
    del ours["softverbs_inject"]
    assert ours.items() <= theirs.items(), sorted(ours.items() - theirs.items())


@linux
@pytest.mark.long
@pytest.mark.parametrize("cables", [1, *(pytest.param(cables, marks=pytest.mark.long) for cables in (2, 4))])
def test_engine_on_the_library(run_ranks, library_directory, cables):
    """mlxdist opens it as it opens libibverbs, and everything above runs on memory that it registers."""
    device = [f"soft{i}" for i in range(cables)]
    outputs = run_ranks(
        "collectives.py", 2, "every", timeout=300,
        environment={
            "LD_LIBRARY_PATH": str(library_directory),
            "MLXDIST_PROVIDER": "ibverbs",
            "MLXDIST_LINKS_PER_PEER": str(cables),
            "MLXDIST_DEVICE_MAP": json.dumps([[None, device], [device, None]]),
        },
    )  # fmt: skip
    assert "112 cases of all_sum on 2 ranks are exact" in outputs[0]


@linux
def test_ranks_that_share_a_device_of_ten_queue_pairs(run_ranks, library_directory):
    """As three ranks on each of two Macs with one cable: rejected on all, before there is a queue pair."""
    cable = [[None if (a < 3) == (b < 3) else f"soft{a // 3}" for b in range(6)] for a in range(6)]
    outputs = run_ranks(
        "collectives.py", 6, "every", status=None,
        environment={
            "LD_LIBRARY_PATH": str(library_directory),
            "SOFTVERBS_PROFILE": "apple-tb5",
            "MLXDIST_PROVIDER": "ibverbs",
            "MLXDIST_DEVICE_MAP": json.dumps(cable),
        },
    )  # fmt: skip
    words = (
        "soft0 has 10 queue pairs, and 9 pairs of ranks over it would need 18: 2 each; it connects ranks 0, 1 and 2 to"
    )
    assert [words in output for output in outputs] == [True] * 6, outputs


@pytest.mark.parametrize("name", ["SOFTVERBS_PROFILE", "SOFTVERBS_FAULTS", "SOFTVERBS_HOST"])
def test_unknown_settings_are_named(tmp_path, own_header, name):
    """A program sees no more than an error of the call; the rest is printed for the user."""
    program = build_program(tmp_path / "objects", sources("objects"), own_header, libraries=LINKED)
    result = subprocess.run(
        [program, "Addresses"], env=os.environ | {name: "nonsense"}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert f"libsoftverbs: {name}=nonsense" in result.stderr
