"""The engine, tested in C on forked ranks, also under sanitizers: native/tests/engine_*_test.c say what is checked."""

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, SANITIZE_THREADS, build_program, layer_sources, run_program

LAYERS = ("verbs", "soft", "endpoint", "reduce", "collectives")
INCLUDES = [f"-I{NATIVE / folder}" for folder in ("include", "verbs", "endpoint", "reduce", "collectives")]
VARIANTS = {"optimized": ["-O2"], "memory": SANITIZE_MEMORY, "threads": SANITIZE_THREADS}


LONG = [pytest.param(variant, marks=pytest.mark.long) for variant in ("optimized", "threads")]


@pytest.mark.parametrize("variant", ["memory", *LONG])
@pytest.mark.parametrize("name", ["engine_test", "engine_faults_test", "engine_cables_test", "engine_repair_test"])
def test_engine(tmp_path, name, variant):
    flags = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *INCLUDES, *VARIANTS[variant]]
    sources = [NATIVE / "tests" / f"{name}.c", *layer_sources(*LAYERS)]
    assert f"{name} passed" in run_program(build_program(tmp_path / "engine", sources, flags), timeout=300)
