"""group.mlx in stock MLX: operations, lazy graphs, gradients, layers, and errors on their way through MLX's threads."""

import sys

import pytest
from native_build import build_program
from rank_counts import one_to_four

# Whatever evaluates an array; the last three ask for its buffer, where NumPy swallows errors.
READERS = ["eval", "np.sqrt"]
READERS += [pytest.param(reader, marks=pytest.mark.long) for reader in ("tolist", "np.array", "np.asarray")]
COUNT_GETPID = """
#include <sys/syscall.h>
#include <unistd.h>
_Atomic int getpid_calls;
pid_t getpid(void) {
  getpid_calls++;
  return (pid_t)syscall(SYS_getpid);
}
"""
SCENARIOS = [
    "middle_of_a_graph",
    "stream_works_on",
    "asynchronous",
    "in_a_thread",
    "refused",
    "finalized",
    "pending_at_exit",
    "forked",
]


@one_to_four(1, 2, 3)
def test_every_operation_on_every_dtype(run_ranks, ranks):
    assert all("exact" in output for output in run_ranks("mlx_operations.py", ranks))


@one_to_four(3)
def test_lazy_graphs(run_ranks, ranks):
    """A chain of 50, independent operations, mx.compile, vmap, async_eval, threads and streams."""
    assert all("exact" in output for output in run_ranks("mlx_graphs.py", ranks))


@one_to_four(3)
def test_gradients_and_layers(run_ranks, ranks):
    """Gradients, shard_linear both ways (also quantized and compiled), average_gradients: as in one process."""
    assert all("close" in output for output in run_ranks("mlx_layers.py", ranks))


@pytest.mark.parametrize("reader", READERS)
def test_failed_operation_is_never_read(run_ranks, reader):
    assert all("as expected" in output for output in run_ranks("mlx_errors.py", 2, f"reader {reader}"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_errors_and_ends(run_ranks, scenario):
    for output in run_ranks("mlx_errors.py", 2, scenario):
        assert "as expected" in output
        assert "Traceback" not in output


def test_four_ranks_end_in_any_order(run_ranks):
    for output in run_ranks("mlx_errors.py", 4, "pending_at_exit"):
        assert "as expected" in output
        assert "Traceback" not in output


def test_nothing_waits_for_the_interpreter_in_mlx_s_threads(run_ranks):
    assert all(output == "done\n" for output in run_ranks("clear_cache.py", 2))


@pytest.mark.skipif(sys.platform == "darwin", reason="getpid() is no system call there")
def test_operations_make_no_system_call_to_detect_forks(run_ranks, tmp_path):
    source = tmp_path / "count_getpid.c"
    source.write_text(COUNT_GETPID)
    library = build_program(tmp_path / "count_getpid.so", [source], ["-D_GNU_SOURCE", "-shared", "-fPIC"])
    outputs = run_ranks("count_getpid.py", 2, environment={"LD_PRELOAD": str(library)})
    assert outputs == ["0 calls in 50 operations\n"] * 2
