"""train.Batches and load_dataset over several ranks: each row on one of them, and one error on all."""

import re
from pathlib import Path

import pytest
from guides import program_of

PAGE = Path(__file__).parents[2] / "docs" / "training-data.md"
long = pytest.mark.long


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=long), pytest.param(2, marks=long), 3, pytest.param(4, marks=long)]
)
def test_parts_of_a_batch(run_scenarios, ranks):
    run_scenarios("batches.py", ranks, "parts")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=long), 2, pytest.param(3, marks=long)])
def test_ten_steps_are_five_a_restart_and_five(run_ranks, tmp_path, ranks):
    outputs = run_ranks("batches.py", ranks, "training", tmp_path)
    assert all("passed\n" in output for output in outputs)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=long)])
def test_meshes(run_scenarios, ranks):
    run_scenarios("batches.py", ranks, "meshes")


@pytest.mark.parametrize("before, after", [(2, 3), (4, 2), (1, 4)])
@long
def test_another_number_of_ranks_goes_on_with_the_same_rows(run_ranks, tmp_path, before, after):
    outputs = run_ranks("batches.py", before, "save", tmp_path, 0) + run_ranks("batches.py", after, "save", tmp_path, 5)
    assert len({output.splitlines()[-2] for output in outputs}) == 1  # the seed, which rank 0 of the first ranks picked


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=long)])
def test_one_error_on_all_ranks(run_ranks, tmp_path, ranks):
    for name, lines in enumerate(['{"text": "a"}', '{"text": "a"}\n{', '{"text": "a"}', '{"text": "b"}']):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    outputs = run_ranks("batches.py", ranks, "refused", tmp_path)
    assert all("passed\n" in output for output in outputs)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=long), 2])
def test_the_program_of_the_page(run_ranks, tmp_path, ranks):
    """Its code runs: two epochs of 100 samples are 16 steps of 12 rows, and the loss falls."""
    for output in run_ranks(program_of(PAGE, tmp_path), ranks):
        steps = re.findall(r"step (\d+): (\d+) rows, loss ([\d.]+)", output)
        assert [(int(step), int(rows)) for step, rows, _ in steps] == [(n, 12 // ranks) for n in range(1, 17)], output
        assert float(steps[-1][2]) < float(steps[0][2]) - 0.1
