"""What a process of pytest loads to know which tests there are: each worker does so before its first test."""

# Parts of mlx-lm load these, whatever the tests do.
OF_MLX_LM = {"activations", "base", "cache", "pipeline", "rope_utils", "switch_layers"}


def test_no_model_file_and_no_client_of_a_server(imported_by_collection):
    """Collected with this file alone, nothing is shown; with all files, as in `make test`, everything."""
    models = {name.rpartition(".")[2] for name in imported_by_collection if name.startswith("mlx_lm.models.")}
    assert models <= OF_MLX_LM
    assert not {"openai", "anthropic", "playwright", "datasets", "matplotlib", "torch"} & imported_by_collection
