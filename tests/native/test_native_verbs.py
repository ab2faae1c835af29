"""The providers by name, the system's verbs library, and what goes wrong with verbs in words."""

import ctypes
import errno
import sys
from pathlib import Path

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, build_program, layer_sources, run_program

REMEDY = "install rdma-core's (Debian: apt-get install libibverbs1 ibverbs-providers)"
VERSIONS = "IBVERBS_1.0 { global: ibv_*; local: *; };\n"
NEWER_VERSIONS = "IBVERBS_1.1 { global: ibv_*; } IBVERBS_1.0;\nIBVERBS_1.11 { global: _ibv_*; } IBVERBS_1.1;\n"
SYMBOLS = [
    *("get_device_list", "free_device_list", "get_device_name", "open_device", "close_device", "query_device"),
    *("query_port", "query_gid", "alloc_pd", "dealloc_pd", "reg_mr", "dereg_mr", "create_cq", "destroy_cq"),
    *("create_qp", "modify_qp", "query_qp", "destroy_qp"),
]

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS finds librdma in its own cache only")


def build(directory: Path, program: str) -> Path:
    sources = [NATIVE / f"tests/{program}_test.c", *layer_sources("providers")]
    return build_program(directory / program, sources, SANITIZE_MEMORY)


def run_with_library(directory: Path, test: str, expected: object = "", **environment: str) -> None:
    """Runs a test of library_test.c with the libibverbs.so.1 of ``directory``."""
    environment |= {"LD_LIBRARY_PATH": str(directory), "EXPECTED": str(expected)}
    run_program(build(directory, "library"), test, environment=environment)


def make_library(directory: Path, *flags: str, versions: str = VERSIONS + NEWER_VERSIONS) -> None:
    """A libibverbs.so.1 in ``directory``: native/tests/libibverbs.c says what ``flags`` make of it."""
    (directory / "versions.map").write_text(versions)
    flags += ("-shared", "-fPIC", f"-Wl,--version-script={directory}/versions.map")
    build_program(directory / "libibverbs.so.1", [NATIVE / "tests/libibverbs.c"], flags)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "test", [pytest.param("Profiles", marks=pytest.mark.long), "WcStatusNames", "Explanations", "EveryExplanation"]
)
def test_profiles_and_words(tmp_path, test):
    run_program(build(tmp_path, "verbs"), test)


@on_linux
def test_words_of_macs(tmp_path):
    """macOS has one errno for a network that is not there and for one that it denies the program (TN3179)."""
    library = build_program(
        tmp_path / "explain.so", [NATIVE / "verbs" / "explain.c"], ["-D__APPLE__", "-shared", "-fPIC"]
    )
    text = ctypes.create_string_buffer(512)
    ctypes.CDLL(str(library)).verbs_explain(b"connect", errno.EHOSTUNREACH, text, len(text))
    assert text.value.startswith(b"No route to host: if ping reaches it, macOS denies this program the local network")
    assert b"System Settings > Privacy & Security > Local Network" in text.value and text.value.endswith(b")")


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "test",
    ["OtherNames", "Pages", "LargePages", "FreedPages", "PagesAndFork", "AppleMessages"] + ["OtherDevicesOfMacs"],
)
def test_without_a_library(tmp_path, test):
    run_program(build(tmp_path, "library"), test)


@on_linux
@pytest.mark.sanitize
@pytest.mark.parametrize("test", ["Devices", "ManyThreads", "QueryGid", "GidTypes", "NoReason"])
def test_library(tmp_path, test):
    make_library(tmp_path)
    run_with_library(tmp_path, test)


@on_linux
def test_not_a_library(tmp_path):
    library = tmp_path / "libibverbs.so.1"
    library.write_text("not a library, and long enough to have a header of one: " + 64 * ".")
    reason = f"provider ibverbs: libibverbs.so.1 cannot be opened ({library}: invalid ELF header); {REMEDY}"
    run_with_library(tmp_path, "Rejected", reason)


@on_linux
@pytest.mark.parametrize("missing", [["reg_mr"], ["query_gid", "destroy_qp"], SYMBOLS], ids=["one", "two", "all"])
def test_missing_symbols(tmp_path, missing):
    """Every one of them is named."""
    make_library(tmp_path, *(f"-Dibv_{name}=other_{name}" for name in missing))
    names = ", ".join(f"ibv_{name}" for name in missing)
    reason = f"provider ibverbs: libibverbs.so.1 lacks {names} of version IBVERBS_1.1; {REMEDY}"
    run_with_library(tmp_path, "Rejected", reason)


@on_linux
def test_library_of_old(tmp_path):
    """It has the names, but not in the version whose structs we pass."""
    make_library(tmp_path, versions=VERSIONS)
    names = ", ".join(f"ibv_{name}" for name in SYMBOLS)
    reason = f"provider ibverbs: libibverbs.so.1 lacks {names} of version IBVERBS_1.1; {REMEDY}"
    run_with_library(tmp_path, "Rejected", reason)


@on_linux
def test_two_versions_of_a_symbol(tmp_path):
    make_library(tmp_path, "-DVERSION_1_0")
    run_with_library(tmp_path, "Devices")


@on_linux
def test_library_without_versions(tmp_path):
    make_library(tmp_path, versions="{ global: ibv_*; _ibv_*; local: *; };\n")
    run_with_library(tmp_path, "Devices")
    run_with_library(tmp_path, "GidTypes")


@on_linux
@pytest.mark.parametrize("error", [errno.ENOSYS, 0], ids=["ENOSYS", "none"])
def test_kernel_without_rdma(tmp_path, error):
    make_library(tmp_path, f"-DERROR={error}")
    run_with_library(tmp_path, "NoDevices")


@on_linux
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOMEM])
def test_listing_fails(tmp_path, error):
    make_library(tmp_path, f"-DERROR={error}")
    run_with_library(tmp_path, "ListingFails", error)


@on_linux
@pytest.mark.parametrize(
    "size, flags2", [(None, 0), ("sizeof(struct verbs_context)", 0x7E57), ("4096", 0x7E57), ("312", 0)]
)
def test_query_port(tmp_path, size, flags2):
    """By the context's own function where there is one: in contexts of today's size and of a later one, but not in
    those of a library that had it not yet."""
    make_library(tmp_path, *([f"-DEXTENDED={size}"] if size else []))
    run_with_library(tmp_path, "QueryPort", flags2)


@on_linux
@pytest.mark.parametrize("flag", ["-D_ibv_query_gid_ex=other", "-DOLD_KERNEL"])
def test_gid_types_of_files(tmp_path, flag):
    """Of libraries and kernels that cannot be asked."""
    for port, lines in {1: ["IB/RoCE v1\n", "RoCE v2\n", "RoCE v3\n", ""], 2: ["IB/RoCE v1\n"]}.items():
        types = tmp_path / "stand0" / "ports" / str(port) / "gid_attrs" / "types"
        types.mkdir(parents=True)
        for index, line in enumerate(lines):
            (types / str(index)).write_text(line)
    make_library(tmp_path, flag)
    run_with_library(tmp_path, "GidTypesOfFiles", STAND_IN_SYSFS=str(tmp_path / "stand0"))
