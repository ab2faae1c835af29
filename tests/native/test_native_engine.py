"""The engine, tested in C, also under sanitizers: native/tests/engine_*_test.c say what is checked."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_build import (
    NATIVE,
    SANITIZE_MEMORY,
    SANITIZE_THREADS,
    build_program,
    layer_includes,
    layer_sources,
    run_program,
    with_simulated_clock,
)

FLAGS = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *layer_includes()]
NAMES = [f"engine{part}_test" for part in ("", "_faults", "_apple", "_odd")]
SLOW = [f"engine{part}_test" for part in ("", "_faults")]
# Time is an input: native/tests/simulation.h.
SIMULATED = [f"engine{part}_test" for part in ("_completions", "_failover", "_keepalive", "_reconnect", "_timers")]
# For the thread sanitizer the ranks are threads of one process, so that it sees both sides of their shared memory.
VARIANTS = {"optimized": ["-O2"], "memory": SANITIZE_MEMORY, "threads": [*SANITIZE_THREADS, "-DWORLD_THREADS"]}


def cases() -> Iterator[object]:
    for name in NAMES:
        yield pytest.param(name, "optimized", marks=[pytest.mark.long] if name in SLOW else [])
        yield pytest.param(name, "memory", marks=[pytest.mark.sanitize, pytest.mark.long])
        yield pytest.param(name, "threads", marks=[pytest.mark.sanitize, pytest.mark.long])


@pytest.mark.parametrize(("name", "variant"), list(cases()))
def test_engine(tmp_path, name, variant):
    sources = [NATIVE / "tests" / f"{name}.c", *layer_sources()]
    program = build_program(tmp_path / "engine", sources, [*FLAGS, *VARIANTS[variant]])
    assert f"{name} passed" in run_program(program)


def build_simulation(directory: Path, name: str, flags: list[str]) -> Path:
    tests = [NATIVE / "tests" / f"{file}.c" for file in (name, "simulation", "simulated_operation")]
    return build_program(directory / name, [*tests, *with_simulated_clock(layer_sources())], [*FLAGS, *flags])


@pytest.mark.parametrize(
    "flags",
    [["-O2"], pytest.param(SANITIZE_MEMORY, marks=[pytest.mark.sanitize, pytest.mark.long])],
    ids=["optimized", "memory"],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name == "engine_failover_test" else []) for name in SIMULATED],
)
def test_simulated_engine(tmp_path, name, flags):
    assert f"{name} passed" in run_program(build_simulation(tmp_path, name, flags))


def run_simulation(program: Path, first: int, runs: int, timeout: float) -> None:
    """Raises AssertionError where the runs have met less than they are for."""
    # One that fails is killed, and keeps what a Mac keeps: protection domains.
    environment = {"XDG_RUNTIME_DIR": str(program.parent)}
    printed = run_program(program, str(first), str(runs), timeout=timeout, environment=environment)
    met = {words[1]: int(words[0]) for words in (part.split() for part in printed.splitlines()[-1].split(", "))}
    assert met["runs"] == runs, printed
    assert all(met.values()), f"the runs from seed {first} have not met everything: {printed}"


def test_simulation(tmp_path):
    run_simulation(build_simulation(tmp_path, "simulation_test", ["-O2"]), 1, 100, 300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "runs"),
    [(["-O2"], 1000), pytest.param(SANITIZE_MEMORY, 200, marks=pytest.mark.sanitize)],
    ids=["optimized", "memory"],
)
def test_simulation_of_other_seeds(tmp_path, pytestconfig, flags, runs):
    """Seeds that ``--choice`` chooses, as it does the long tests of CI. A failure prints the seed."""
    first = random.Random(pytestconfig.getoption("--choice")).randrange(1 << 32)
    run_simulation(build_simulation(tmp_path, "simulation_test", flags), first, runs, 900)


@pytest.mark.parametrize("name", ["operation_test", "places_test"])
@pytest.mark.parametrize(
    "variant", ["optimized", pytest.param("memory", marks=[pytest.mark.sanitize, pytest.mark.long])]
)
def test_engine_without_collectives(tmp_path, name, variant):
    flags = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *layer_includes("engine"), *VARIANTS[variant]]
    sources = [NATIVE / "tests" / f"{name}.c", *layer_sources("engine")]
    assert f"{name} passed" in run_program(build_program(tmp_path / "program", sources, flags))
