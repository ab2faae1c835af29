"""The engine, tested in C, also under sanitizers: native/tests/engine_*_test.c say what is checked."""

from collections.abc import Iterator

import pytest
from native_build import (
    NATIVE,
    SANITIZE_MEMORY,
    SANITIZE_THREADS,
    build_program,
    layer_includes,
    layer_sources,
    run_program,
)

FLAGS = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *layer_includes()]
PARTS = ("", "_faults", "_failover", "_reconnect", "_keepalive", "_apple", "_odd", "_completions")
NAMES = [f"engine{part}_test" for part in PARTS]
SLOW = [f"engine{of}_test" for of in ("", "_keepalive", "_faults", "_failover", "_completions")]
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
    assert f"{name} passed" in run_program(program, timeout=600)


@pytest.mark.parametrize("name", ["operation_test", "places_test"])
@pytest.mark.parametrize(
    "variant", ["optimized", pytest.param("memory", marks=[pytest.mark.sanitize, pytest.mark.long])]
)
def test_engine_without_collectives(tmp_path, name, variant):
    flags = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *layer_includes("engine"), *VARIANTS[variant]]
    sources = [NATIVE / "tests" / f"{name}.c", *layer_sources("engine")]
    assert f"{name} passed" in run_program(build_program(tmp_path / "program", sources, flags))
