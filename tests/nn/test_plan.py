"""Plans: what the ranks hold of every parameter, without a group and without evaluating one."""

import json
import re

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxdist import InvalidArgument
from mlxdist.nn.models.plan import OWN_SHARD, PATTERNS, UNSHARDED, Plan, plan_shards

LARGE = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "intermediate_size": 14336, "num_hidden_layers": 32,
}  # fmt: skip
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 9}
NOT_CUT = ("mamba", "mamba2", "bitnet", "muse_spark")
ONE = HEADS | {"num_key_value_heads": 1}


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "mixtral", "phi3", "gpt_neox", "jamba", "kimi_k3", "mamba"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_of_every_parameter_make_the_full_one(name, ranks):
    """Each element is on as many ranks as the plan says, and on one at least; the shards have the planned shapes."""
    model = tiny_models.build(name)
    arrays = dict(tree_flatten(model.parameters()))
    plan = plan_shards(model, tp=ranks)
    assert list(plan.shards) == list(arrays)
    for path, shard in plan.shards.items():
        array = arrays[path]
        assert (shard.shape, str(array.dtype)) == (array.shape, f"mlx.core.{shard.dtype}")
        assert bool(shard.ranges) == (shard.reason == "") == (shard.kind != "full")
        if not shard.ranges:
            assert shard.bytes(0) == array.nbytes
            continue
        held = [
            index for rank in range(ranks) for piece in shard.slices(rank) for index in range(piece.start, piece.stop)
        ]
        assert set(held) == set(range(array.shape[shard.axis])) and len(held) == sum(shard.sizes)
        for rank in range(ranks):
            assert shard.take(array, rank).shape == shard.shape_on(rank)
            assert shard.take(array, rank).nbytes == shard.bytes(rank)


def test_fused_layers_have_several_pieces():
    plan = plan_shards(tiny_models.build("phi3"), tp=2)
    fused = plan.shards["model.layers.0.self_attn.qkv_proj.weight"]
    assert (fused.segments, fused.sizes) == ((64, 32, 32), [64, 64])
    assert fused.ranges[1] == ((32, 64), (80, 96), (112, 128))
    assert plan.shards["model.layers.0.mlp.gate_up_proj.weight"].ranges[0] == ((0, 48), (96, 144))


def test_nothing_is_evaluated():
    """A model of more than 16 GiB is planned in some megabytes."""
    for name in ("llama", "smollm3", "mixtral"):
        model = tiny_models.build(name, **LARGE)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        plan = plan_shards(model, tp=4)
        assert mx.get_peak_memory() - before < 64 << 20
        assert plan.bytes(0) < 0.5 * plan.full_bytes and plan.full_bytes > 16 << 30


def test_the_table_folds_layers_and_shows_totals():
    plan = plan_shards(tiny_models.build("qwen3"), tp=2)
    lines = str(plan).splitlines()
    assert lines[0] == "qwen3: tp=2 x ep=1, sharded by model.shard()"
    (queries,) = [line for line in lines if "q_proj" in line]
    assert re.fullmatch(
        r"model\.layers\.\{0-3\}\.self_attn\.q_proj\.weight +64 x 64 +column, axis 0 +32 KiB +32 KiB", queries
    )
    assert re.match(r"in all +\S+ KiB +\S+ KiB +55% of \S+ KiB at most", lines[-1])
    assert len({line.find("full ") for line in lines if " full " in line}) == 1, "columns are aligned"
    assert "\x1b" not in str(plan) and not any(line != line.rstrip() for line in lines)
    assert any("a norm, small" in line for line in lines)


def test_many_ranks_are_two_columns():
    lines = str(plan_shards(tiny_models.build("gptj", n_head=8), tp=8)).splitlines()
    assert re.search(r"least +most", lines[1])


def test_json_both_ways():
    for arguments in ({"tp": 2}, {"tp": 2, "rank_shares": [2, 1]}, {"tp": 2, "ep": 2}):
        plan = plan_shards(tiny_models.build("mixtral"), **arguments)
        again = Plan.from_json(plan.to_json())
        assert again == plan and str(again) == str(plan)
    for text in ("", "{}", "[]", '{"shards": [{"path": 1}]}', '{"shards": []}', "null"):
        with pytest.raises(InvalidArgument, match="not the JSON of a plan"):
            Plan.from_json(text)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tp": 2000}, "tp is 2000, not a whole number from 1 to 256"),
        ({"ep": True}, "ep is True, not a whole number"),
        ({"rank_shares": [1, -1]}, "rank_shares is -1, not a number above 0"),
        ({"rank_shares": [1]}, "rank_shares must be tp positive numbers"),
        ({"more": 1}, "'more' is no field"),
        ({"notes": "none"}, "notes is no list"),
        ({"shards": {}}, "shards is no list"),
        ({"dtype": "float33"}, "dtype is 'float33', not one of"),
        ({"kind": "diagonal"}, "kind is 'diagonal', not one of"),
        ({"shape": [-1, 2]}, "shape is -1, not a whole number"),
        ({"axis": 2}, "no such axis"),
        ({"ranges": [[[0, 1]]]}, "ranges must be there for each rank"),
        ({"ranges": [[[0, 1]], [[1, 10**9]]]}, "is no range within"),
        ({"ranges": [[[1, 0]], [[1, 2]]]}, "is no range within"),
        ({"ranges": []}, "what is full has no ranges"),
        ({"scale": 0}, "scale is 0, not a number above 0"),
        ({"path": "a\0"}, "path must be a text"),
    ],
)
def test_a_plan_that_was_edited_is_checked(change, words):
    document = json.loads(plan_shards(tiny_models.build("llama"), tp=2).to_json())
    cut = next(shard for shard in document["shards"] if shard["ranges"])
    (name,) = change
    (cut if name in cut else document).update(change)
    with pytest.raises(InvalidArgument, match=words):
        Plan.from_json(json.dumps(document))


def test_shard_of_a_model_is_used_where_it_is_right():
    assert plan_shards(tiny_models.build("llama"), tp=2).how == OWN_SHARD
    assert plan_shards(tiny_models.build("llama"), tp=2, rank_shares=[1, 1]).how == PATTERNS
    assert plan_shards(tiny_models.build("mamba"), tp=2).how == UNSHARDED
    assert plan_shards(tiny_models.build("llama"), tp=1).how == UNSHARDED
    plan = plan_shards(tiny_models.build("llama"), tp=4)
    assert plan.how == PATTERNS and "n_kv_heads = 2 over 4 ranks" in plan.notes[0]
    assert plan.shards["model.layers.0.self_attn.k_proj.weight"].ranges[1:3] == (((0, 16),), ((16, 32),))
    rotated = plan_shards(tiny_models.build("prism_hadamard_qwen35"), tp=2)
    assert "model.shard() fails" in rotated.notes[0]
    assert not any("mlp" in shard.path for shard in rotated.sharded)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_every_model_file_is_cut_over_any_number_of_ranks(ranks):
    """Unevenly, where that does not divide heads or hidden layers, and with copies of KV heads; with weights, too."""
    for name in [name for name in tiny_models.model_files() if name not in tiny_models.NOT_IMPORTED]:
        plan = plan_shards(tiny_models.build(name), tp=ranks)
        assert plan.sharded or name in NOT_CUT, name
        assert all(min(shard.sizes) > 0 for shard in plan.sharded), name
        plan_shards(tiny_models.build(name), tp=ranks, rank_shares=[2, *[1] * (ranks - 1)])


@pytest.mark.parametrize(
    ("shares", "words"), [([1], "must be 2 numbers, one per rank, not "), ([1, -1], "must be positive numbers, not ")]
)
def test_rank_shares_that_do_not_fit(shares, words):
    with pytest.raises(InvalidArgument, match=f"^plan_shards: rank_shares {words}"):
        plan_shards(tiny_models.build("llama"), tp=2, rank_shares=shares)


def test_one_rank_takes_a_model_with_adapters():
    model = tiny_models.build("llama")
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    plan_shards(model, tp=1).check(model)
    with pytest.raises(InvalidArgument, match="there is an adapter"):
        plan_shards(model, tp=2)


def test_layers_that_borrow_kv_heads_are_cut_as_those_they_borrow_from():
    """Otherwise all attention stays unsharded: some of it must, or quantization groups are sharded elsewhere."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    wide = tiny_models.build("gemma4_text", **heads)
    nn.quantize(wide, 32, 4, class_predicate=lambda path, _: path == "model.layers.3.self_attn.o_proj")
    narrow = tiny_models.build("gemma4_text", **heads)
    nn.quantize(narrow, 32, 4, class_predicate=lambda path, _: path == "model.layers.2.self_attn.o_proj")
    for model, cut in [
        (tiny_models.build("gemma4_text", **tiny_models.GLOBAL_KV_HEAD), True),
        (wide, True),
        (narrow, False),
    ]:
        attention = [shard for path, shard in plan_shards(model, tp=2).shards.items() if "self_attn.o_proj" in path]
        assert {bool(shard.ranges) for shard in attention} == {cut}
        assert cut or any("work with the heads of others" in shard.reason for shard in attention)


def test_copies_of_kv_heads_where_some_ranks_have_one_query_head_for_each():
    """4 heads of 1 KV head on 3 ranks: 2, 1, 1, each with its own copy; not where a model has but one KV head."""
    plan = plan_shards(tiny_models.build("smollm3", heads=(4, 1)), tp=3)
    keys = plan.shards["model.layers.0.self_attn.k_proj.weight"]
    assert keys.ranges == (((0, 16), (0, 16)), ((0, 16), (0, 0)), ((0, 16), (0, 0)))
    assert [keys.take(mx.ones(keys.shape), rank).shape for rank in range(3)] == [(32, 64), (16, 64), (16, 64)]
    assert Plan.from_json(plan.to_json()) == plan
    for name, heads in (("recurrent_gemma", (4, 1)), ("olmo2", (4, 1))):
        shards = plan_shards(tiny_models.build(name, heads=heads), tp=3).shards.items()
        assert not any(shard.ranges for path, shard in shards if "k_proj" in path), name


def test_quantized_heads_are_cut_between_quantization_groups():
    """12 heads of 32 features, in groups of 64, over 4 ranks: not 3 heads each."""
    model = tiny_models.build("smollm3", heads=(12, 12), head_dim=32, hidden_size=384, intermediate_size=384)
    nn.quantize(model, group_size=64, bits=4)
    plan = plan_shards(model, tp=4)
    assert plan.shards["model.layers.0.self_attn.o_proj.scales"].sizes == [2, 2, 1, 1]


def test_what_is_not_understood_stays_whole():
    model = tiny_models.build("smollm3")
    model.model.layers[1].self_attn.invented = mx.ones((64,))
    model.model.layers[2].mlp.invented = nn.Linear(3, 3)
    plan = plan_shards(model, tp=2)
    for layer, block, reason in ((1, "self_attn", "what invented does in"), (2, "mlp", "what invented does in")):
        shards = [shard for path, shard in plan.shards.items() if path.startswith(f"model.layers.{layer}.{block}.")]
        assert shards and all(shard.kind == "full" and reason in shard.reason for shard in shards)
    assert plan.shards["model.layers.0.self_attn.q_proj.weight"].kind == "column"


@pytest.mark.parametrize(
    ("words", "name", "fields", "arguments"),
    [
        ("tp must be a positive integer, not 0", "llama", {}, {"tp": 0}),
        ("tp must be a positive integer, not True", "llama", {}, {"tp": True}),
        ("ep must be a positive integer, not 1.5", "llama", {}, {"ep": 1.5}),
        ("rank_shares", "llama", {}, {"tp": 2, "rank_shares": [1]}),
        ("rank_shares", "llama", {}, {"tp": 2, "rank_shares": [1, -1]}),
        ("heads of model.layers.0.self_attn: query heads: 9 is too little for 10", "smollm3", HEADS, {"tp": 10}),
        ("query heads of a KV head: 9 is too little for 10 ranks", "smollm3", ONE, {"tp": 10}),
        ("experts of model.layers.0.block_sparse_moe.switch_mlp", "mixtral", {}, {"tp": 1, "ep": 8}),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_as_requested_is_rejected(words, name, fields, arguments):
    with pytest.raises(InvalidArgument, match=words):
        plan_shards(tiny_models.build(name, **fields), **({"tp": 2} | arguments))


def test_a_quantization_group_is_not_cut():
    model = tiny_models.build("smollm3")
    nn.quantize(model, group_size=64, bits=4, class_predicate=lambda path, _: path.endswith("o_proj"))
    with pytest.raises(
        InvalidArgument, match="self_attn of 16 features, with quantization groups of 64 behind them: KV heads: 2"
    ):
        plan_shards(model, tp=2)
