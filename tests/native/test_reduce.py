"""The reductions, tested in C for every instruction set: see native/tests/reduce_test.c for what is checked."""

import platform
import shutil
from pathlib import Path

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, build_program, directory_sources, run_program

INCLUDES = [f"-I{NATIVE / directory}" for directory in ("include", "reduce")]
OPTIMIZED = ["-O3", "-ffp-contract=off"]
VARIANTS = {"optimized": OPTIMIZED, "sanitized": SANITIZE_MEMORY}
ARM64_COMPILER = "aarch64-linux-gnu-gcc"
X86 = platform.machine() == "x86_64"


def build(directory: Path, flags: list[str], compiler: str | None = None) -> Path:
    sources = [NATIVE / "tests" / "reduce_test.c", *directory_sources("reduce")]
    return build_program(directory / "reduce", sources, [*flags, *INCLUDES], compiler)


def run_all(program: Path, *emulator: str) -> list[str]:
    """Runs all tests of ``program`` and returns the instruction sets that it tested."""
    command = [*emulator, str(program)]
    output = run_program(Path(command[0]), *command[1:])
    assert "5 tests, 0 failed" in output
    return output.splitlines()[0].removeprefix("instruction sets: ").split()


def own_instruction_sets() -> list[str]:
    if not X86:
        return ["neon"] if platform.machine() in ("aarch64", "arm64") else ["baseline"]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    sets = {"baseline": set(), "avx2": {"avx2", "f16c"}, "avx512": {"avx2", "f16c", "avx512f"}}
    return [name for name, needed in sets.items() if needed <= flags]


def require(command: str, packages: str) -> None:
    if not shutil.which(command):
        pytest.skip(f"there is no {command}: apt-get install {packages}")


@pytest.mark.long
@pytest.mark.parametrize("variant", ["optimized", pytest.param("sanitized", marks=pytest.mark.sanitize)])
def test_reduce(tmp_path, variant):
    assert run_all(build(tmp_path, VARIANTS[variant])) == own_instruction_sets()


@pytest.mark.long
def test_reduce_on_arm64(tmp_path):
    require(ARM64_COMPILER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    require("qemu-aarch64", "qemu-user")
    assert run_all(build(tmp_path, [*OPTIMIZED, "-static"], ARM64_COMPILER), "qemu-aarch64") == ["neon"]


@pytest.mark.long
@pytest.mark.skipif(not X86, reason="for processors of this family")
@pytest.mark.parametrize("processor, expected", [("Nehalem", ["baseline"]), ("max,-avx512f", ["baseline", "avx2"])])
def test_reduce_on_older_x86(tmp_path, processor, expected):
    """On an emulated processor, which refuses the instructions that it lacks."""
    require("qemu-x86_64", "qemu-user")
    assert run_all(build(tmp_path, [*OPTIMIZED, "-static"]), "qemu-x86_64", "-cpu", processor) == expected
