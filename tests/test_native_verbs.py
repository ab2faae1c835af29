"""Which verbs provider is chosen, and what the user is told about it."""

import errno
import sys

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, build_program, layer_sources, run_program

# What the system's library says, as flags for the stand-in, and the reason that must be given.
LIBRARIES = {
    "no_device": (["-DDEVICES=0"], "no RDMA device found"),
    "one_device": (["-DDEVICES=1"], "all ranks are on one host; 1 RDMA device left unused"),
    "two_devices": (["-DDEVICES=2"], "all ranks are on one host; 2 RDMA devices left unused"),
    "kernel_without_rdma": (["-DDEVICES=0", f"-DERROR={errno.ENOSYS}"], "no RDMA device found"),
    "not_permitted": (
        ["-DDEVICES=0", f"-DERROR={errno.EPERM}"],
        "RDMA devices could not be listed: Operation not permitted",
    ),
}


def build(folder, flags):
    sources = [NATIVE / "tests/verbs_test.c", *layer_sources("verbs", "soft")]
    return build_program(folder / "verbs_test", sources, flags)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS finds librdma in its own cache only")
@pytest.mark.parametrize("library", LIBRARIES)
def test_reason(tmp_path, library):
    flags, reason = LIBRARIES[library]
    build_program(tmp_path / "libibverbs.so.1", [NATIVE / "tests/libibverbs.c"], ["-shared", "-fPIC", *flags])
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "EXPECTED_REASON": reason}
    run_program(build(tmp_path, ["-O2"]), "Reason", environment=environment)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS finds librdma in its own cache only")
def test_reason_if_the_library_is_not_one(tmp_path):
    (tmp_path / "libibverbs.so.1").write_text("not a library\n")
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "EXPECTED_REASON": "no RDMA device found"}
    run_program(build(tmp_path, ["-O2"]), "Reason", environment=environment)


@pytest.mark.sanitize
@pytest.mark.parametrize("test", ["Choose", "WcStatusNames"])
def test_profiles_and_status_names(tmp_path, test):
    run_program(build(tmp_path, SANITIZE_MEMORY), test)
