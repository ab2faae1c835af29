"""Every collective on NumPy arrays: dtype x size x ranks, with data that differs in every rank, against NumPy."""

import pytest

OPERATIONS = dict.fromkeys(
    ["all_sum", "all_max", "all_min", "all_prod", "all_gather", "sum_scatter", "broadcast", "send_recv"], 154
) | dict.fromkeys(["reduce_scatter", "reduce", "gather", "scatter", "all_to_all", "all_to_all_v"], 112)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_exact_for_every_dtype_and_size(run_ranks, operation):
    outputs = run_ranks("collectives.py", 2, operation, timeout=300)
    assert f"{OPERATIONS[operation]} cases of {operation} on 2 ranks are exact" in outputs[0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_operation_in_one_job(run_ranks, ranks):
    outputs = run_ranks("collectives.py", ranks, *OPERATIONS, timeout=400)
    for operation, cases in OPERATIONS.items():
        assert f"{cases} cases of {operation} on {ranks} ranks are exact" in outputs[0]


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("ranks", "links"), [(2, 2), (2, 3), (2, 4), (3, 4)])
def test_every_operation_over_several_links(run_ranks, ranks, links, transport):
    environment = {"MLXDIST_LINKS_PER_PEER": str(links), "MLXDIST_SOFT_TRANSPORT": transport}
    outputs = run_ranks("collectives.py", ranks, *OPERATIONS, timeout=400, environment=environment)
    for operation, cases in OPERATIONS.items():
        assert f"{cases} cases of {operation} on {ranks} ranks are exact" in outputs[0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [5, 8])
def test_more_ranks_than_cores(run_ranks, ranks):
    outputs = run_ranks("many_ranks.py", ranks, timeout=120)
    assert all("exact" in output for output in outputs)


def test_every_16_bit_float(run_ranks):
    """All 65536 values of float16 and bfloat16 survive the way into float32 and back, and round as NumPy rounds."""
    outputs = run_ranks("every_16_bit_float.py", 2)
    assert all("exact" in output for output in outputs)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shapes(run_ranks, ranks):
    """Scalars, many dimensions, strides, read-only inputs, `out`: what NumPy users have."""
    outputs = run_ranks("shapes.py", ranks)
    assert all("exact" in output for output in outputs)


def test_nan_and_infinity(run_ranks):
    outputs = run_ranks("special_floats.py", 3)
    assert all("exact" in output for output in outputs)
