"""`mlxdist serve` with every way to spread a model over ranks, given or chosen: the tokens of one process."""

import re
from itertools import combinations

import pytest
from click.testing import CliRunner
from serving import ServerProcess, save_model_folder

from mlxdist.base import tuning_file
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.cli.shard import shard
from mlxdist.nn.expert_parallel.links import RankLinks
from mlxdist.nn.expert_parallel.policy import COLLECTIVES
from mlxdist.nn.models.load.weight_sources import open_model
from mlxdist.nn.models.plan import plan_shards
from mlxdist.nn.pipeline_parallel import plan_stages
from mlxdist.serve.decode_cost import DecodeCost, MeasuredRanks


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
def test_sums_of_a_decode_step_are_those_that_are_predicted(run_ranks, models):
    assert all("right" in output for output in run_ranks("placement.py", 2, "counted", models))


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


@pytest.mark.long
def test_two_hosts_with_a_slow_link_share_layers_within_each(models, tmp_path):
    """Virtual hosts of two ranks, and a tuning file with costs between them: tp x pp is chosen, rank 0 says why, and
    its tokens are those of one process."""

    def link(ranks, hosts, latency):
        costs = dict.fromkeys(COLLECTIVES, {"latency": latency, "bandwidth": 1e9})
        return {"provider": "soft", "ranks": ranks, "hosts": hosts, "plan": 1e-4, "costs": costs}

    known = [link(2, 1, 1e-5), link(4, 2, 1e-2)]
    tuning_file.update(tmp_path / "tuning.json", {"expert_links": known})
    with ServerProcess(models / "qwen3") as one:
        expected = [one.text(prompt, 16) for prompt in ("where it is", "what it was")]
    on_hosts = 'export MLXDIST_EMULATED_NODE=$((MLXDIST_RANK / 2)) MLXDIST_MEMORY_GBPS=0.01,0.01,0.01,0.01; exec "$@"'
    variables = {"MLXDIST_TUNING_FILE": str(tmp_path / "tuning.json")}
    with ServerProcess(models / "qwen3", 4, before=["sh", "-c", on_hosts, "sh"], **variables) as server:
        assert [server.text(prompt, 16) for prompt in ("where it is", "what it was")] == expected
        assert server.stop() == 0
    printed = "".join(server.lines)
    assert "ranks: 4, tp=2 x pp=2\n" in printed
    milliseconds = r"[\d.]+ ms"
    times = f"a token takes {milliseconds}, with tp=4 {milliseconds}, with pp=4 {milliseconds}; ep=4, ep=2 x pp=2: the"
    assert re.search(f" of weights, tp=2 x pp=2, since {times} model has no experts", printed)
    # The bytes that were predicted are those that the ranks hold.
    model, _, _ = open_model(Checkpoint(models / "qwen3"))
    plan, links = (
        plan_shards(model, 2),
        RankLinks((0, 0, 1, 1), dict.fromkeys(combinations(range(4), 2), "soft"), known),
    )
    estimate = DecodeCost(model, MeasuredRanks((1.0,) * 4, (1e12,) * 4, links)).of(plan, plan_stages(model, 2))
    held = re.findall(r"^\[0\] +[0-3]  .+  \d+ to \d+ +([\d.]+) KiB +\d\d%  ", printed, re.M)
    assert len(held) == 4 and estimate.most * plan.full_bytes / 1024 == pytest.approx(max(map(float, held)), abs=0.01)
