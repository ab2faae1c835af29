"""An operation on mx.array that failed, and all that MLX has computed from it, raise at every attempt to read them."""

import pytest

slow = pytest.mark.long


@pytest.mark.parametrize(
    "scenario, through, ranks",
    [
        ("mismatch", "mlx", 2),
        ("mismatch", "mpi_shim", 3),
        pytest.param("mismatch", "mlx", 3, marks=slow),
        pytest.param("mismatch", "mpi_shim", 2, marks=slow),
        ("timeout", "mlx", 2),
        pytest.param("timeout", "mpi_shim", 2, marks=slow),
        pytest.param("timeout", "mlx", 3, marks=slow),
        ("lost", "mlx", 3),
        pytest.param("lost", "mpi_shim", 3, marks=slow),
        pytest.param("lost", "mlx", 2, marks=slow),
    ],
)
def test_every_reader_raises_at_every_attempt(run_ranks, scenario, through, ranks):
    lost = scenario == "lost"
    outputs = run_ranks("failed_arrays.py", ranks, scenario, through, status=128 + 9 if lost else 0)
    assert all("as expected" in output for output in (outputs[:-1] if lost else outputs))


@pytest.mark.long
@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("through", ["mlx", pytest.param("mpi_shim", marks=slow)])
def test_operations_under_way_after_it(run_ranks, through, thread):
    assert all("as expected" in output for output in run_ranks("failed_async.py", 2, through, thread))
