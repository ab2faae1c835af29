"""Column- and row-parallel layers against the layers they are made from: outputs, gradients, and the way back."""

from pathlib import Path

import pytest
from guides import program_of

PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"

SCENARIOS = [
    "columns", "rows", "empty", "mlp", "sequence", "states", "quantized", "joining", "refused",
    "sequences_of_different_lengths",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_parallel_layers_compute_and_train_as_the_full_layers(run_ranks, ranks):
    """The scenarios are functions of tests/rank_scripts/tensor_parallel.py."""
    assert all("close" in output for output in run_ranks("tensor_parallel.py", ranks, *SCENARIOS))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_parallel_layers_over_packets(run_ranks, ranks):
    """On devices that play those of macOS 27, where each packet of 4 KiB is a message."""
    environment = {"MLXDIST_SOFT_PROFILE": "apple-tb5-27"}
    outputs = run_ranks("tensor_parallel.py", ranks, *SCENARIOS, timeout=240, environment=environment)
    assert all("close" in output for output in outputs)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_form_also_compiled(run_ranks, ranks):
    """All group sizes, and mx.compile of every case."""
    outputs = run_ranks("tensor_parallel.py", ranks, "everything", *SCENARIOS, timeout=240)
    assert all("close" in output for output in outputs)


def test_the_example_of_the_documentation(run_ranks, tmp_path):
    """It runs, and prints what is shown below it."""
    page = PAGE.read_text()
    assert all(f"    {output}" in page for output in run_ranks(program_of(PAGE, tmp_path), 2))
