"""The engine, tested in C, also under sanitizers: native/tests/engine_*_test.c say what is checked."""

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, SANITIZE_THREADS, build_program, layer_sources, run_program

LAYERS = ("verbs", "soft", "endpoint", "reduce", "collectives")
INCLUDES = [f"-I{NATIVE / folder}" for folder in ("include", "verbs", "endpoint", "reduce", "collectives")]
FLAGS = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *INCLUDES]
# For the thread sanitizer the ranks are threads of one process, so that it sees both sides of their shared memory.
VARIANTS = {
    "optimized": ["-O2"],
    "memory": SANITIZE_MEMORY,
    "threads": [*SANITIZE_THREADS, "-DWORLD_THREADS"],
}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("optimized", marks=pytest.mark.long),
        pytest.param("memory", marks=pytest.mark.sanitize),
        pytest.param("threads", marks=[pytest.mark.sanitize, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize("name", ["engine_test", "engine_faults_test", "engine_cables_test", "engine_repair_test"])
def test_engine(tmp_path, name, variant):
    sources = [NATIVE / "tests" / f"{name}.c", *layer_sources(*LAYERS)]
    program = build_program(tmp_path / "engine", sources, [*FLAGS, *VARIANTS[variant]])
    assert f"{name} passed" in run_program(program, timeout=600)
