"""`mlxdist serve` with every way to spread a model over ranks, given or chosen: the tokens of one process."""

import re

import pytest
from click.testing import CliRunner
from serving import ServerProcess, save_model_folder

from mlxdist.cli.shard import shard


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with some: ranks cannot share layers of one head, nor be stages of one layer."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "qwen3_moe", "mamba2"):
        save_model_folder(folder / kind, kind)
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
    save_model_folder(folder / "one_head", **one_head)
    save_model_folder(folder / "one_layer", **one_head, num_hidden_layers=1)
    return folder


@pytest.mark.long
def test_shares_experts_and_stages_that_are_given(run_ranks, models):
    assert all("right" in output for output in run_ranks("placement.py", 2, "given", models))


@pytest.mark.long
def test_a_plan_and_a_model_that_only_rank_0_has(run_ranks, models):
    arguments = [str(models / "qwen3"), "--tp", "2", "--rank-shares", "2,1", "--json"]
    (models / "plan.json").write_text(CliRunner().invoke(shard, arguments).stdout)
    assert all("right" in output for output in run_ranks("placement.py", 2, "files", models))


@pytest.mark.long
def test_stages_that_share_layers(run_ranks, models):
    assert all("right" in output for output in run_ranks("placement.py", 4, "grids", models))


@pytest.mark.long
def test_the_choice(run_ranks, models):
    assert all("right" in output for output in run_ranks("placement.py", 2, "chosen", models))


@pytest.mark.long
def test_what_cannot_be_is_the_same_error_on_all_ranks(run_ranks, models):
    assert all("right" in output for output in run_ranks("placement.py", 2, "refused", models))


@pytest.mark.long
def test_a_server_whose_rank_0_alone_has_the_model(models):
    """Ranks in directories of their own; rank 0 shows who holds what."""
    (models / "0").mkdir()
    (models / "1").mkdir()
    (models / "0" / "tiny").symlink_to(models / "qwen3")
    with ServerProcess(models / "qwen3") as one:
        expected = one.text("where it is", 16)
    own_directory = ["sh", "-c", 'cd "$MLXDIST_RANK" && exec "$@"', "sh"]
    options = ["--stream-weights", "--rank-shares", "2,1"]
    with ServerProcess("tiny", 2, *options, cwd=models, before=own_directory) as server:
        assert server.text("where it is", 16) == expected
        assert server.ask(None, "/v1/models")["data"][0]["id"] == "tiny"
        assert server.stop() == 0
    printed = "".join(server.lines)
    assert "of weights, tp=2, rank shares [2.0, 1.0]\n" in printed and "ranks: 2, tp=2\n" in printed
    held = [float(number) for number in re.findall(r"^\[0\] +[01]  .+  all +([\d.]+) KiB +\d\d%  ", printed, re.M)]
    assert len(held) == 2 and held[0] > 1.2 * held[1]
