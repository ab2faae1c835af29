"""verify finds a rank that computes something else; `mlxdist shard` prints a plan, and checks it on ranks."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.utils import save_config, save_model

from mlxdist.cli import commands
from mlxdist.nn.models.plan import Plan

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def directory(tmp_path):
    from mlx_lm.models import qwen3

    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    save_model(tmp_path, model)
    save_config(dict(CONFIG), tmp_path / "config.json")
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_another_weight_on_one_rank_is_found_on_all(run_ranks, tmp_path, ranks):
    assert all("right" in output for output in run_ranks("loading.py", ranks, "verification", tmp_path))


def test_the_command_prints_a_plan_and_starts_nothing(directory):
    result = CliRunner().invoke(commands, ["shard", str(directory), "--tp", "2"])
    assert result.exit_code == 0, result.output
    assert "q_proj" in result.output
    result = CliRunner().invoke(commands, ["shard", str(directory), "--tp", "2", "--json"])
    document = json.loads(result.output)
    plan = Plan.from_json(json.dumps(document["plan"]))
    assert (plan.tp, plan.ranks, document["verification"]) == (2, 2, None)


def test_the_command_takes_the_name_of_a_model_that_has_been_downloaded(directory, tmp_path_factory, monkeypatch):
    hub = tmp_path_factory.mktemp("hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    result = CliRunner().invoke(commands, ["shard", "org/model", "--tp", "2"])
    assert result.exit_code == 2 and "type: mlxdist pull org/model" in result.output
    kept = hub / "models--org--model"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "snapshots" / "0123").symlink_to(directory)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    result = CliRunner().invoke(commands, ["shard", "org/model", "--tp", "2"])
    assert result.exit_code == 0 and "q_proj" in result.output, result.output


@pytest.mark.parametrize(
    "options, status, words",
    [
        (["--tp", "5"], 2, "5"),
        (["--tp", "0"], 2, "--tp"),
        (["--tp", "2", "--rank-shares", "2,x"], 2, "'2,x' is not positive numbers"),
        (["--tp", "2", "--rank-shares", "1,2,3"], 2, "2 numbers, one per rank"),
    ],
)
def test_what_cannot_be_sharded_is_reported(directory, options, status, words):
    result = CliRunner().invoke(commands, ["shard", str(directory), *options])
    assert result.exit_code == status and words in result.output, result.output


def test_damaged_files_are_reported(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = CliRunner().invoke(commands, ["shard", str(directory)])
    assert result.exit_code == 2 and "model.safetensors is damaged" in result.output


def run_shard(directory, *options):
    command = [sys.executable, "-m", "mlxdist", "shard", str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_verify_runs_the_model_on_ranks(directory):
    result = run_shard(directory, "--tp", "2", "--verify", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["verification"]
    assert found["agrees"] and len(found["differences"]) == 2 and max(found["differences"]) < 1e-4
    assert found["dtype"] == "float32" and found["positions"] == 16
    assert 0 < found["loading"]["bytes_read"] < 0.9 * found["loading"]["bytes_total"]


@pytest.mark.long
def test_verify_fails_where_logits_are_no_numbers(directory):
    weights = mx.load(str(directory / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * mx.inf
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    result = run_shard(directory, "--tp", "2", "--verify")
    assert result.returncode == 1 and "DO NOT AGREE on ranks 0 and 1" in result.stdout, result.stderr
