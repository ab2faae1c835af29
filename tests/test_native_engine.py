"""The engine, tested in C on forked ranks, also under sanitizers: native/tests/engine_test.c says what is checked."""

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, build_program, layer_sources, run_program

LAYERS = ("verbs", "soft", "endpoint", "reduce", "collectives")
INCLUDES = [f"-I{NATIVE / folder}" for folder in ("include", "verbs", "endpoint", "reduce", "collectives")]
VARIANTS = {"optimized": ["-O2"], "sanitized": SANITIZE_MEMORY}


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine(tmp_path, variant):
    flags = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *INCLUDES, *VARIANTS[variant]]
    sources = [NATIVE / "tests" / "engine_test.c", *layer_sources(*LAYERS)]
    assert "engine_test passed" in run_program(build_program(tmp_path / "engine", sources, flags), timeout=300)
