"""load_sharded: every rank holds its part of the model, has read little else; all compute the full model's logits."""

import pytest
from rank_counts import one_to_four


@pytest.mark.long
@one_to_four(2)
def test_models_of_every_kind_in_files_and_streamed(run_ranks, tmp_path, ranks):
    """float32, 16-bit, quantized, with experts; in one file and in several; bitwise the shards, and the logits."""
    assert all("right" in output for output in run_ranks("loading.py", ranks, "models", tmp_path))


@one_to_four(2)
def test_each_rank_reads_and_holds_its_share(run_ranks, tmp_path, ranks):
    """Bytes read from files, the most memory of MLX at any time; shards of different sizes; experts; models by name."""
    outputs = run_ranks("loading.py", ranks, "sizes,plans,named,experts", tmp_path)
    assert all(output.count("right") == 4 for output in outputs)
    for what in ("mlxdist: loading: ", "mlxdist: streaming: "):
        assert [what in output for output in outputs] == [True] + [False] * (ranks - 1)


@one_to_four(2)
def test_adapters_of_mlx_lm_are_sharded_with_the_model(run_ranks, tmp_path, ranks):
    assert all("right" in output for output in run_ranks("loading_adapters.py", ranks, "adapters", tmp_path))


@pytest.mark.long
@one_to_four(2)
def test_bad_input_on_one_rank_is_the_same_error_on_all(run_ranks, tmp_path, ranks):
    """Also of a stream that breaks."""
    outputs = run_ranks("loading.py", ranks, "refused,failing_stream", tmp_path)
    assert all(output.count("right") == 2 for output in outputs)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_parameters_that_mlx_lm_computes_are_read_in_full_with_a_warning(run_ranks, tmp_path, ranks):
    outputs = run_ranks("loading.py", ranks, "computed", tmp_path)
    assert all("right" in output for output in outputs)
    assert "3 parameters" in outputs[0] and "mlx_lm.convert" in outputs[0]
    assert "mlx_lm.convert" not in outputs[1]


@pytest.mark.long
def test_every_model_file_of_mlx_lm(run_ranks, tmp_path):
    """What a rank loads is bitwise its shard of what mlx-lm loads."""
    outputs = run_ranks("loading.py", 2, "model_files", tmp_path, timeout=240)
    assert all("right" in output for output in outputs)
