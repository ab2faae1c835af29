"""SplitModel of every model file of mlx-lm with every cache of mlx-lm: the logits are those of the full model."""

import pytest
import split_table
import tiny_models
from rank_counts import one_to_four

# Segments, layers with a window, experts, one that scales by the position.
TYPICAL = ["llama", "mixtral", "gemma3_text", "ministral3"]
# The compiled segments are compared by tests/nn/test_split_block.py; here compilers would take most of the time.
INTERPRETED = {"MLX_DISABLE_COMPILE": "1"}


def test_typical_models_with_all_caches(run_scenarios):
    run_scenarios("split_models.py", 2, "matrix", 2, *TYPICAL, environment=INTERPRETED)


@pytest.mark.long
def test_every_model_file_with_all_caches(run_scenarios):
    """Found in mlx-lm's directory. That nothing can be sharded of a model is the only reason to reject one."""
    names = [name for name in tiny_models.compared_files() if name not in split_table.NOT_CUT]
    assert len(names) > 115
    run_scenarios("split_models.py", 2, "matrix", 5, *names, environment=INTERPRETED, timeout=280)


def test_sums_of_full_layers_are_submitted(run_scenarios):
    run_scenarios("split_models.py", 2, "submitted", environment=INTERPRETED)


def test_checks(run_scenarios):
    """Of logits with -inf and NaN, and of models that differ between ranks."""
    run_scenarios("split_models.py", 2, "checks", environment=INTERPRETED)


@pytest.mark.long
def test_window_with_plain_caches(run_scenarios):
    run_scenarios("split_models.py", 2, "sliding", timeout=100)


@pytest.mark.long
@one_to_four(2)
def test_past_every_boundary_of_positions(run_scenarios, ranks):
    run_scenarios("split_models.py", ranks, "positions", environment=INTERPRETED)


@pytest.mark.long
def test_past_more_boundaries_of_positions(run_scenarios):
    run_scenarios("split_models.py", 2, "more_positions", environment=INTERPRETED)


@pytest.mark.long
def test_the_table_of_models_is_current():
    """Written by `python tests/support/split_table.py`."""
    assert split_table.FILE.read_text() == split_table.write()
