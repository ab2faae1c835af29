"""The software verbs provider, tested in C: see native/tests/soft_*_test.c for what is checked."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_build import (
    NATIVE,
    SANITIZE_MEMORY,
    SANITIZE_THREADS,
    build_program,
    layer_sources,
    run_program,
    with_simulated_clock,
)

# Compiler flags, and where segments live: macOS's way also works on Linux, so it is tested there too.
OWN_SEGMENT = "memfd" if sys.platform == "linux" else "posix"
VARIANTS = {
    "optimized": (["-O2"], OWN_SEGMENT),
    "sanitized": (SANITIZE_MEMORY, OWN_SEGMENT),
    "posix_segments": (SANITIZE_MEMORY, "posix"),
}
PROGRAMS = ["objects", "regions", "messages", "gather", "errors", "faults", "damage", "delay", "idle"]
PROGRAMS += ["apple", "apple_life", "packets", "odd", "rxe", "writes", "peers", "processes", "scale", "stress"]
PROGRAMS += ["key", "strangers", "tcp", "tcp_faults", "tcp_processes", "tcp_writes"]
SLOW = ["processes", "stress", "tcp_processes", "objects", "faults", "damage", "apple_life", "scale"]
SLOW += ["regions", "tcp", "writes"]
SIMULATED = ["delay", "idle"]  # time is an input
SHARED_MEMORY = Path("/dev/shm")


def segment_names() -> set[Path]:
    """Shared memory that has a name; macOS does not list it."""
    return set(SHARED_MEMORY.glob("mlxdist-*"))


def build(directory: Path, program: str, flags: list[str], segment: str) -> Path:
    tests = NATIVE / "tests"
    sources = [tests / f"soft_{program}_test.c", tests / "soft_side.c", tests / "soft_stream.c"]
    provider = layer_sources("providers", segment)
    return build_program(
        directory / program, sources + (with_simulated_clock(provider) if program in SIMULATED else provider), flags
    )


def cases() -> Iterator[object]:
    for program in PROGRAMS:
        yield pytest.param("optimized", program, marks=[pytest.mark.long] if program in SLOW else [])
        yield pytest.param("sanitized", program, marks=[pytest.mark.sanitize, pytest.mark.long])
        yield pytest.param("posix_segments", program, marks=[pytest.mark.sanitize, pytest.mark.long])


@pytest.mark.parametrize(("variant", "program"), list(cases()))
def test_soft(tmp_path, variant, program):
    flags, segment = VARIANTS[variant]
    before = segment_names()
    run_program(build(tmp_path, program, flags, segment))
    assert segment_names() <= before, "a segment was left behind"


@pytest.mark.sanitize
@pytest.mark.long
def test_soft_without_data_races(tmp_path):
    """Two threads on two contexts of one process: both use one mapping, so the sanitizer sees every access."""
    program = build(tmp_path, "stress", SANITIZE_THREADS, OWN_SEGMENT)
    run_program(program, "TwoThreads", "ResetUnderFire", environment={"MESSAGES": "40000"})
    program = build(tmp_path, "tcp_processes", SANITIZE_THREADS, OWN_SEGMENT)
    run_program(program, "TwoThreads", environment={"MESSAGES": "20000"})
