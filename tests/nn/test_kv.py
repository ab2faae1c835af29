"""`mlxdist.kv`: a prompt that one rank has computed is gone on with by another, bitwise as by one process."""

import re
from pathlib import Path

import pytest
import tiny_models
from guides import program_of

from mlxdist.kv import same_model
from mlxdist.kv.same_model import described_model

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long
GUIDE = Path(__file__).parents[2] / "docs" / "kv.md"
# Keys and values; two kinds in one model; a cache without length; lists of caches; latent attention.
TYPICAL = ["qwen3", "gpt_oss", "mamba", "falcon_h1", "deepseek_v3"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_caches_of_models(run_scenarios, ranks):
    run_scenarios("kv.py", ranks, "models", "plain", *TYPICAL)


@pytest.mark.parametrize("made", ["quantized", "rotating"])
def test_other_caches(run_scenarios, made):
    run_scenarios("kv.py", 2, "models", made, "qwen3")


@LONG
def test_every_model_file_of_mlx_lm(run_scenarios):
    names = [name for name in tiny_models.compared_files() if name != "deepseek_v41"]  # whose caches are its own
    run_scenarios("kv.py", 2, "models", "plain", *names, timeout=400)


@pytest.mark.parametrize("scenario", ["bytes_sent", "all_shapes", "bad_input", "bad_pair"])
def test_caches(run_scenarios, scenario):
    run_scenarios("kv.py", 2, scenario)


ARRAY_OF_NO_DTYPE = '[["KVCache", [{"shape": [1], "dtype": "os"}]]]'


@pytest.mark.parametrize("text", ["long", *(pytest.param(text, marks=LONG) for text in ("[", "3", "[" * 9999))])
def test_bytes_that_are_no_message(run_scenarios, text):
    run_scenarios("kv.py", 2, "bad_bytes", text)


@pytest.mark.parametrize("layers", [ARRAY_OF_NO_DTYPE, pytest.param('[["os", []]]', marks=LONG)])
def test_messages_that_describe_no_cache(run_scenarios, layers):
    run_scenarios("kv.py", 2, "bad_layers", layers)


def test_a_model_is_described_once(monkeypatch):
    """As long as it has the same arrays: other weights make another description."""
    model, other = tiny_models.build("qwen3"), tiny_models.build("qwen3")
    described = described_model(model)
    with monkeypatch.context() as patch:
        patch.setattr(same_model, "_hash", None)  # is not called again
        assert described_model(model) == described
        with pytest.raises(TypeError):
            described_model(other)
    assert described_model(other)["arguments"] == described["arguments"]
    model.model.norm.weight = model.model.norm.weight + 1
    assert described_model(model)["part"] != described["part"]
    model.model.layers[0].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight[:-1]
    assert described_model(model)["part"] not in (described["part"], described_model(other)["part"])


def test_a_sender_that_dies(run_ranks):
    outputs = run_ranks("kv.py", 2, "lost", status=9)
    assert "passed" in outputs[1]


# tp x pp of the ranks that compute prompts, and of those that go on.
@pytest.mark.parametrize(
    "senders, receivers, made, names",
    [
        ("2x1", "1x1", "plain", ["qwen3", "gpt_oss", "falcon_h1"]),
        ("1x1", "1x2", "plain", ["qwen3"]),
        pytest.param("1x1", "2x1", "plain", ["qwen3", "phi3", "gpt_neox", "deepseek_v3", "falcon_h1"], marks=LONG),
        pytest.param("1x2", "1x1", "plain", ["qwen3", "mamba", "deepseek_v2"], marks=LONG),
        pytest.param("2x1", "2x1", "plain", ["qwen3"], marks=LONG),
        pytest.param("1x2", "2x1", "plain", ["qwen3", "gpt_oss", "mamba", "deepseek_v3", "falcon_h1"], marks=LONG),
        pytest.param("2x1", "1x2", "plain", ["qwen3", "gpt_oss", "falcon_h1"], marks=LONG),
        pytest.param("2x2", "1x1", "plain", ["qwen3"], marks=LONG),
        # Fewer KV heads than ranks, and uneven shares; a query head has a copy of its KV head.
        pytest.param("2x1", "4x1", "plain", ["qwen3", "gpt_oss"], marks=LONG),
        pytest.param("4x1", "1x1", "plain", ["qwen3"], marks=LONG),
        pytest.param("3x1", "2x1", "plain", ["qwen3:6,3"], marks=LONG),
        pytest.param("2x1:3,1", "1x1", "plain", ["qwen3:8,4", "gpt2:4,4", "qwen3:3,1"], marks=LONG),
        pytest.param("1x1", "2x1:1,3", "plain", ["qwen3:8,4", "qwen3:3,1"], marks=LONG),
        *[
            pytest.param(*grids, made, ["qwen3"], marks=LONG)
            for made in ("quantized", "rotating", "rows")
            for grids in (("2x1", "1x2"), ("1x2", "2x1"))
        ],
    ],
)
def test_sides_with_other_shards_and_stages(run_scenarios, senders, receivers, made, names):
    run_scenarios("kv.py", ranks_of(senders) + ranks_of(receivers), "sides", senders, receivers, made, *names)


@LONG
@pytest.mark.parametrize("side", ["2x1", "1x2"])
def test_ranks_with_the_same_shards_and_stages(run_scenarios, side):
    run_scenarios("kv.py", 4, "same_parts", side)


# States of sharded recurrent layers; keys that another layer or one outside of the layers has made; keys of an index.
NOT_KNOWN = ["hunyuan", "iquestloopcoder", "kimi_k3", "longcat_flash_ngram", "minimax_m3_vl", "qwen3_5", "qwen3_5_moe"]


@LONG
def test_shards_of_every_model_file(run_scenarios):
    names = [name for name in tiny_models.compared_files() if name != "deepseek_v41"]
    specs = [f"-{name}" if name in NOT_KNOWN else name for name in names]
    run_scenarios("kv.py", 3, "sides", "2x1", "1x1", "plain", *specs, timeout=500)


@pytest.mark.parametrize("senders, receivers", [pytest.param("4x1", "1x1", marks=LONG), ("2x1", "1x2")])
def test_what_several_senders_have_is_sent_once(run_scenarios, senders, receivers):
    run_scenarios("kv.py", ranks_of(senders) + ranks_of(receivers), "bytes_of_sides", senders, receivers, "qwen3")


def test_sides_that_do_not_fit(run_scenarios):
    run_scenarios("kv.py", 3, "bad_sides")


@LONG
def test_ranks_that_do_not_fit(run_scenarios):
    run_scenarios("kv.py", 2, "bad_pairs")


OFFER = '{"name": "%s", "state": %s, "listed": false, "heads": [%s], "total": 2, "widths": [8, 8]}'
ARRAY = '{"shape": [1, 2, 3, %s], "dtype": "float32"}'


@LONG
@pytest.mark.parametrize(
    "layers",
    [
        "3",
        '[[{"name": "KVCache"}]]',
        f"[[{OFFER % ('os', '[]', '')}]]",
        f"[[{OFFER % ('CacheList', '[]', '')}]]",
        f"[[{OFFER % ('KVCache', '[null, null, 0]', '0, 2')}]]",
        f"[[{OFFER % ('KVCache', f'[{ARRAY % 8}, {ARRAY % 8}, 3]', '0')}]]",
        f"[[{OFFER % ('KVCache', f'[{ARRAY % 8}, {ARRAY % -8}, 3]', '0, 1')}]]",
        f"[[{OFFER % ('KVCache', f'[{ARRAY % 8}, {ARRAY % 9}, 3]', '0, 1')}]]",
    ],
)
def test_bytes_that_describe_no_part_of_a_cache(run_scenarios, layers):
    run_scenarios("kv.py", 2, "bad_offers", layers)


@pytest.mark.long
def test_one_of_the_senders_dies(run_ranks):
    outputs = run_ranks("kv.py", 3, "lost_sender", status=9)
    assert "passed" in outputs[0] and "passed" in outputs[2]


@pytest.mark.long
def test_the_program_of_the_guide(run_ranks, tmp_path):
    first, second = run_ranks(program_of(GUIDE, tmp_path), 2)
    assert first == "" and len(second.split()) == 8


@LONG
def test_the_shards_and_stages_of_the_guide(run_ranks, tmp_path):
    """Its second program goes on where the first has made the model, and prints the same tokens."""
    first, second = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "second.py").write_text(first.partition("if rank == 0")[0] + second)
    _, tokens = run_ranks(program_of(GUIDE, tmp_path), 2)
    assert run_ranks(tmp_path / "second.py", 4) == ["", "", tokens, tokens]


def ranks_of(side):
    tp, pp = side.partition(":")[0].split("x")
    return int(tp) * int(pp)
