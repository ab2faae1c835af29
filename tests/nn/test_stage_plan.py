"""`plan_stages`: which stage has which layers, next to all plans that there are."""

import functools
import itertools
import json

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist import InvalidArgument
from mlxdist.nn import StagePlan, plan_stages
from mlxdist.nn.interception import restore
from mlxdist.nn.pipeline_parallel.missing_layers import drop_parameters

LAYERS = (2, 3, 5, 7)


@functools.cache
def model_of(layers: int) -> nn.Module:
    return tiny_models.build("qwen3_moe", num_hidden_layers=layers)


def slowest(plan, ranges, link):
    """How long the slowest of these stages takes, and all bytes that are sent."""
    rank_shares, costs = plan.rank_shares or (1.0,) * plan.stages, []
    head = plan.outside_bytes["after"] + plan.outside_bytes["both"]
    for number, (start, stop) in enumerate(ranges):
        received = plan.message_bytes[1] if number else 0  # it is the same for all layers of this model
        work = sum(plan.layer_bytes[start:stop]) + (head if stop == len(plan.layer_bytes) else 0)
        costs.append(work / rank_shares[number % plan.stages] + (received / link if link else 0))
    return max(costs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_best_of_all_plans(data):
    """Every layer once, in order, in stages that are not empty; no other plan has a faster slowest stage."""
    layers = data.draw(st.sampled_from(LAYERS))
    virtual = data.draw(st.integers(1, 2))
    stages = data.draw(st.integers(1, max(1, layers // virtual)))
    numbers = st.lists(st.floats(0.1, 10), min_size=stages, max_size=stages)
    rank_shares, link = data.draw(st.none() | numbers), data.draw(st.none() | st.floats(1e-3, 10))
    if stages * virtual > layers:
        return
    plan = plan_stages(model_of(layers), stages, rank_shares=rank_shares, link=link, virtual=virtual)
    assert [start for start, _ in plan.ranges] == [0, *(stop for _, stop in plan.ranges[:-1])]
    assert plan.ranges[-1][1] == layers and all(start < stop for start, stop in plan.ranges)
    assert sorted(number for stage in range(stages) for number in plan.layers(stage)) == list(range(layers))
    cuts = itertools.combinations(range(1, layers), stages * virtual - 1)
    others = [list(zip((0, *cut), (*cut, layers))) for cut in cuts]
    assert slowest(plan, plan.ranges, link) == pytest.approx(min(slowest(plan, one, link) for one in others))
    assert StagePlan.from_json(plan.to_json()) == plan


@settings(max_examples=40, deadline=None)
@given(stages=st.integers(1, 5), share=st.floats(0.05, 1.2))
def test_memory(stages, share):
    """Below the limit, or an error that says by how much it is too small."""
    model = model_of(5)
    limit = int(plan_stages(model, 1).bytes(0) * share)
    try:
        plan = plan_stages(model, stages, memory=limit)
    except InvalidArgument as error:
        assert "plan_stages: the memory is too small: stage " in str(error) and "less; more stages" in str(error)
        return
    assert max(map(plan.bytes, range(stages))) <= limit


def test_memory_of_all_ranges_of_a_stage():
    """Each of two virtual stages would fit, but not both."""
    full = plan_stages(model_of(5), 2, virtual=2)
    with pytest.raises(InvalidArgument, match="the memory is too small: stage"):
        plan_stages(model_of(5), 2, virtual=2, memory=max(map(full.bytes, range(2))) - 1)


def test_memory_of_each_stage_moves_layers():
    full = plan_stages(model_of(5), 2)
    layer = full.layer_bytes[0]
    plan = plan_stages(model_of(5), 2, memory=[full.bytes(0) - layer, full.bytes(1) + 2 * layer])
    assert len(plan.layers(0)) == len(full.layers(0)) - 1
    with pytest.raises(InvalidArgument, match=r"stage 0 would hold .* and has room for 1 B"):
        plan_stages(model_of(5), 2, memory=[1, 10**9])


def test_stages_that_are_twice_as_fast_have_twice_the_layers():
    model = tiny_models.build("qwen3", num_hidden_layers=12, vocab_size=8)
    assert [len(plan_stages(model, 2, rank_shares=pair).layers(0)) for pair in ([2, 1], [1, 1], [1, 2])] == [8, 6, 4]


@pytest.mark.parametrize("word", ["memory", "compute"])
def test_measured_weights(monkeypatch, word):
    """Of the ranks of a stage the slowest counts: four ranks are two stages of two."""
    monkeypatch.setenv(f"MLXDIST_RANK_SHARES_{word.upper()}", "8,2,1,4")
    model = tiny_models.build("qwen3", num_hidden_layers=12, vocab_size=8)
    assert plan_stages(model, 2, rank_shares=word).rank_shares == (2.0, 1.0)
    with pytest.raises(InvalidArgument, match="4 ranks of the job, which are not 3 equal stages"):
        plan_stages(model, 3, rank_shares=word)


@pytest.mark.long
def test_every_model_file_has_a_plan_or_a_reason():
    """And nothing is evaluated: the parameters of tiny models are random, and stay unevaluated."""
    refused = {}
    for name in tiny_models.compared_files():
        try:
            plan_stages(tiny_models.build(name), 2)
        except InvalidArgument as error:
            refused[name] = str(error)
    assert sorted(refused) == ["afm7", "gemma3n", "gemma4", "gemma4_text", "iquestloopcoder", "kimi_k3"]
    assert all("layer" in text for text in refused.values())


def test_nothing_is_evaluated():
    """A model of more than 16 GiB is planned in some megabytes."""
    large = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    large |= {"vocab_size": 128256, "intermediate_size": 14336, "num_hidden_layers": 32}
    model = tiny_models.build("llama", **large)
    mx.reset_peak_memory()
    plan = plan_stages(model, 4)
    assert mx.get_peak_memory() < 50e6 and sum(map(plan.bytes, range(4))) > 16 * 2**30
    assert [len(plan.layers(stage)) for stage in range(4)] == [8, 9, 9, 6]  # the head is 2.4 layers


def test_the_table():
    text = str(plan_stages(tiny_models.build("llama"), 2, rank_shares=[3, 1]))
    lines = text.splitlines()
    assert lines[0] == "llama: 4 layers in 2 stages" and len(lines) == 4
    assert lines[1].split() == ["stage", "layers", "and", "speed", "work", "parameters", "sends", "a", "token"]
    assert lines[2].split()[:4] == ["0", "0-2", "embedding", "75%"] and "256 B" in lines[2]
    assert lines[3].split()[:4] == ["1", "3", "head", "25%"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": 0}, "stages must be from 1"),
        ({"stages": True}, "stages must be from 1"),
        ({"stages": 5}, "llama can be cut in 4 stages at most, and 5 were asked for"),
        ({"stages": 2, "virtual": 3}, "llama can be cut in 4 stages at most, and 6"),
        ({"stages": 2, "virtual": 0}, "virtual must be from 1"),
        ({"stages": 2, "rank_shares": [1]}, "^plan_stages: rank_shares must be 2 numbers, one per stage, not "),
        ({"stages": 2, "rank_shares": [1, -1]}, "^plan_stages: rank_shares must be positive numbers, not "),
        (
            {"stages": 2, "rank_shares": "speed"},
            'rank_shares must be 2 numbers, one per stage, or "memory" or "compute"',
        ),
        ({"stages": 2, "rank_shares": "memory"}, "needs a job whose hosts are measured"),
        ({"stages": 2, "link": 0}, "link must be a positive number"),
        ({"stages": 2, "memory": [1]}, "memory must be bytes, one number or 2"),
        ({"stages": 2, "memory": 0.5}, "memory must be bytes"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(InvalidArgument, match=words):
        plan_stages(tiny_models.build("llama"), **options)


@pytest.mark.parametrize(
    "change",
    [
        {"ranges": [[0, 2], [3, 4]]},
        {"ranges": [[0, 4], [4, 4]]},
        {"ranges": [[0, 4]]},
        {"stages": 3},
        {"rank_shares": [1.0]},
        {"rank_shares": [float("nan"), 1.0]},
        {"layer_bytes": [-1, 1, 1, 1]},
        {"layer_bytes": "1111"},
        {"outside_bytes": {}},
        {"message_bytes": []},
        {"model_type": "\x1b[2J"},
    ],
)
def test_json_that_is_no_plan(change):
    fields = json.loads(plan_stages(tiny_models.build("llama"), 2).to_json())
    with pytest.raises(InvalidArgument, match="this is not the JSON of a plan"):
        StagePlan.from_json(json.dumps(fields | change))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000])
def test_text_that_is_no_plan(text):
    with pytest.raises(InvalidArgument, match="this is not the JSON of a plan"):
        StagePlan.from_json(text)


def test_the_class_of_a_layer_without_parameters_is_restored():
    layer = nn.Linear(2, 2)
    drop_parameters(layer)
    restore(layer)
    assert type(layer) is nn.Linear
