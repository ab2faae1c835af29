"""`mlxdist tiny-model`: small models that mlx-lm loads, and that are sharded where the large ones are."""

import json
import math

import mlx.core as mx
import pytest
import tiny_models
from bpe_models import bpe_tokenizer
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import _get_classes, load, load_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mlxdist
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.cli import commands
from mlxdist.nn.models.load import load_sharded
from mlxdist.nn.models.load.weight_sources import open_model
from mlxdist.nn.models.mtp_head import load_mtp_head
from mlxdist.nn.models.plan import plan_shards
from mlxdist.tools.models.small_config import small_config

# Families whose default configuration in transformers is that of a published model, as mlx-lm reads it.
LARGE = (
    *("afmoe", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm", "gpt_oss", "jamba", "kimi_k25", "llama"),
    *("mixtral", "mistral4", "nemotron_h", "olmo2", "phi3", "qwen2_moe", "qwen3", "qwen3_5_moe", "starcoder2"),
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QUANTIZED = {"quantization": {"group_size": 64, "bits": 4}}


def run(*words, status=0):
    done = CliRunner().invoke(commands, ["tiny-model", *map(str, words)])
    assert done.exit_code == status, done.output
    return done.output


def make(folder, config, *options):
    (folder / "config.json").write_text(json.dumps(config))
    return json.loads(run(folder, folder / "made", "--json", *options))


def plan(model, ranks):
    """Which share of the bytes a rank holds at most; 1 where nothing is sharded, None where that is rejected."""
    try:
        found = plan_shards(model, tp=ranks)
    except InvalidArgument:
        return None
    return 1.0 if not found.sharded else max(map(found.bytes, range(ranks))) / found.full_bytes


def some_of(names):
    """All names, of which one in eight is for `make test`."""
    return [pytest.param(name, marks=[pytest.mark.long] * (number % 8 > 0)) for number, name in enumerate(names)]


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("more", [{}, QUANTIZED])
def test_a_head_for_multi_token_prediction_is_there_where_the_config_has_one(tmp_path, kind, more):
    """In a file that mlx-lm does not read, which would refuse its weights."""
    config = tiny_models.config_of(kind) | {"num_nextn_predict_layers": 1} | more
    make(tmp_path, config)
    mlxdist.init()
    load_model(tmp_path / "made")
    head = load_mtp_head(tmp_path / "made", plan_shards(load_sharded(tmp_path / "made")[0]))
    assert ("scales" in head.projection) == bool(more)
    (tmp_path / "none").mkdir()
    make(tmp_path / "none", config | {"num_nextn_predict_layers": 0})
    assert not (tmp_path / "none" / "made" / "mtp.safetensors").exists()


@pytest.mark.parametrize("name", some_of(LARGE))
def test_it_is_sharded_where_the_large_model_is(name):
    config = CONFIG_MAPPING[name]().to_dict()
    small = small_config(config)
    models = [classes[0](classes[1].from_dict(one)) for one in (config, small) for classes in [_get_classes(one)]]
    large, tiny = (plan_shards(model, tp=1) for model in models)
    assert tiny.full_bytes < min(large.full_bytes / 20, 60e6)
    kinds = [{path.rpartition("layers.")[2].partition(".")[2] for path in one.shards} for one in (large, tiny)]
    assert kinds[0] == kinds[1]  # layers of every kind
    for ranks in (2, 3, 4):
        shares = [plan(model, ranks) for model in models]
        assert shares[0] is None or (shares[1] is not None and (shares[0] < 1) == (shares[1] < 1)), (ranks, shares)


@pytest.mark.parametrize("name", some_of(tiny_models.model_files()))
def test_mlx_lm_loads_it(name, tmp_path):
    if name in tiny_models.NOT_IMPORTED:
        pytest.skip(tiny_models.NOT_IMPORTED[name])
    config = tiny_models.config_of(name)
    made = make(tmp_path, config)
    model, _, loaded = open_model(Checkpoint(tmp_path / "made"))
    assert made["model_type"] == loaded["model_type"] == name
    mtp = mx.load(str(file)) if (file := tmp_path / "made" / "mtp.safetensors").exists() else {}
    assert plan_shards(model).full_bytes + sum(array.nbytes for array in mtp.values()) == made["bytes"]


# float32: with weights that are random, experts have nearly the same chance, and the last bit chooses.
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "quantization"), [(3, {}), (2, QUANTIZED), (4, QUANTIZED)])
def test_ranks_compute_what_one_computes(ranks, quantization, tmp_path):
    heads = {"num_attention_heads": 24, "num_key_value_heads": 12, "torch_dtype": "float32"}
    make(tmp_path, MIXTRAL | heads | quantization)
    done = CliRunner().invoke(commands, ["shard", str(tmp_path / "made"), "--tp", str(ranks), "--verify", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["verification"]["agrees"] and any(shard["ranges"] for shard in found["plan"]["shards"])


def test_quantized_weights_stay_so(tmp_path):
    make(tmp_path, LLAMA | {"quantization": QUANTIZED["quantization"] | {"lm_head": False}})
    model, sources, _ = open_model(Checkpoint(tmp_path / "made"))
    assert model.layers[0].mlp.up_proj.bits == 4 and "lm_head.scales" not in sources
    assert model.model.norm.weight.dtype.size == 2  # bfloat16


def test_weights_of_another_format_become_plain(tmp_path):
    make(tmp_path, LLAMA | {"quantization_config": {"quant_method": "awq"}})
    assert all(tensor.dtype == "BF16" for tensor in Checkpoint(tmp_path / "made").tensors.values())


def test_the_seed_decides_the_weights(tmp_path):
    weights = {}
    for number, seed in enumerate((1, 1, 2)):
        (folder := tmp_path / str(number)).mkdir()
        make(folder, LLAMA, "--seed", seed)
        weights[number] = (folder / "made" / "model.safetensors").read_bytes()
    assert weights[0] == weights[1] != weights[2]


def test_a_tokenizer_comes_along_and_the_vocabulary_stays(tmp_path):
    tokenizer = bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    made = make(tmp_path, LLAMA | {"vocab_size": 5000})
    model, loaded = load(str(tmp_path / "made"))
    assert loaded.encode("the answer") == tokenizer.encode("the answer")
    assert model.args.vocab_size == 5000 and "vocab_size" not in made["sizes"]
    assert "config.json" in {path.name for path in tmp_path.iterdir()}  # the large model is as it was
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 4096


def test_settings(tmp_path):
    made = make(
        tmp_path, LLAMA, "--keep-sizes", "--set", "num_hidden_layers=1", "--set", "hidden_size=64",
        "--set", "attention_bias=true", "--set", "vocab_size=128",
    )  # fmt: skip
    assert made["sizes"] == {"num_hidden_layers": [32, 1], "hidden_size": [4096, 64], "vocab_size": [128256, 128]}
    model, sources, config = open_model(Checkpoint(tmp_path / "made"))
    assert len(model.layers) == 1 and config["intermediate_size"] == 14336
    assert "model.layers.0.self_attn.q_proj.bias" in sources  # a field that this configuration leaves out


def test_settings_of_a_nested_configuration(tmp_path):
    config = {"model_type": "qwen3_vl", "text_config": LLAMA | {"model_type": "qwen3", "head_dim": 128}}
    config["text_config"]["max_position_embeddings"] = 4096
    made = make(tmp_path, config, "--set", "num_hidden_layers=2")
    assert made["sizes"]["text_config.num_hidden_layers"] == [32, 2]
    assert len(open_model(Checkpoint(tmp_path / "made"))[0].layers) == 2


def test_lists_of_layers_are_as_long_as_there_are_layers():
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = {"num_hidden_layers": 48, "layer_types": kinds * 12, "mlp_only_layers": [1, 40]}
    small = small_config(config)
    assert small == {"num_hidden_layers": 4, "layer_types": kinds, "mlp_only_layers": [1]}
    of_six = small_config({"n_layer": 36, "kinds": ["s"] * 5 + ["f"] + ["s"] * 30})
    assert of_six == {"n_layer": 6, "kinds": ["s"] * 5 + ["f"]}
    assert small_config(config, {"num_hidden_layers": 2})["layer_types"] == kinds[:2]
    assert small_config({"num_hidden_layers": 8, "hybrid_override_pattern": "M-M*M-M*"}) == {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-M*",
    }


@given(st.integers(1, 96), st.integers(1, 16), st.sampled_from([0, 8, 60, 128, 257]))
def test_heads_and_experts_keep_what_divides_them(groups, queries, experts):
    config = {"num_attention_heads": groups * queries, "num_key_value_heads": groups, "num_experts": experts}
    small = small_config(config)
    for name, before in config.items():
        after = small[name]
        assert after <= before and math.gcd(after, 12) == math.gcd(before, 12), (name, small)
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small_config(small) == small


@pytest.mark.parametrize(
    ("config", "options", "problem"),
    [
        ({"hidden_size": 4}, (), "it has no model_type"),
        ({"model_type": "no_such"}, (), "mlx-lm does not know this model: Model type no_such not supported"),
        (LLAMA | {"model_file": "model.py"}, (), "names a program (model_file)"),
        (LLAMA | {"quantization": {"bits": 4}}, (), "group_size is missing"),
        (LLAMA, ("--set", "num_layer=2"), "--set num_layer: no such field; did you mean num_hidden_layers?"),
        (LLAMA, ("--set", "hidden_size"), "write NAME=VALUE"),
        (LLAMA, ("--set", "hidden_size=1", "--set", "hidden_size=2"), "gives a field twice"),
        (LLAMA, ("--set", f"vocab_size={2**31}"), "--set vocab_size: 2147483648 is more than 2147483647"),
        (LLAMA, ("--set", "num_hidden_layers=-3"), "--set num_hidden_layers: -3 is no size"),
        (LLAMA, ("--set", "num_hidden_layers=true"), "--set num_hidden_layers: true is no size"),
        (LLAMA, ("--set", "num_key_value_heads=0"), "--set num_key_value_heads: 0 is no size"),
        (
            LLAMA | {"num_hidden_layers": 10**8, "sliding_window_pattern": 10**8}, (),
            "num_hidden_layers would be 100000000, and 1024 are the most; give fewer with --set num_hidden_layers=4",
        ),
        (LLAMA, ("--set", "hidden_size=big"), "mlx-lm cannot build a llama of these sizes"),
        ([1], (), "no configuration of a model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_written(config, options, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = " ".join(run(tmp_path, tmp_path / "made", *options, status=2).split())
    assert problem in output, output
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_model_that_is_larger_than_the_disk(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    output = run(tmp_path, tmp_path / "made", "--keep-sizes", "--set", "intermediate_size=2000000000", status=1)
    assert "the small model needs" in output and "GiB left" in output and not (tmp_path / "made").exists()


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").touch()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "exists; remove it or name another one" in " ".join(run(tmp_path, tmp_path / "made", status=2).split())
