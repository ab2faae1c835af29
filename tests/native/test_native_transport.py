"""The transport, tested in C without the engine, also under sanitizers."""

import pytest
from native_build import (
    NATIVE,
    SANITIZE_MEMORY,
    build_program,
    layer_includes,
    layer_sources,
    run_program,
    with_simulated_clock,
)

SANITIZED = pytest.param(SANITIZE_MEMORY, marks=[pytest.mark.sanitize, pytest.mark.long])


@pytest.mark.parametrize("flags", [["-O2"], SANITIZED], ids=["optimized", "memory"])
@pytest.mark.parametrize("program", ["transport_test.c", "probe_test.c", "peer_probe_test.c"])
def test_transport(tmp_path, program, flags):
    sources = [NATIVE / "tests" / program, *with_simulated_clock(layer_sources("transport"))]
    flags = ["-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *layer_includes("transport"), *flags]
    assert ", 0 failed" in run_program(build_program(tmp_path / "transport", sources, flags))
