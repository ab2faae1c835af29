"""The placement that `mlxdist serve` chooses from measurements, without ranks: tp, ep, stages, or tp x pp."""

import json
from dataclasses import replace
from itertools import combinations

import mlx.core as mx
import pytest
import tiny_models

from mlxdist import InvalidArgument
from mlxdist.nn.expert_parallel.links import RankLinks
from mlxdist.nn.expert_parallel.policy import COLLECTIVES
from mlxdist.nn.models.plan import plan_shards
from mlxdist.nn.pipeline_parallel import plan_stages
from mlxdist.serve.decode_cost import DecodeCost, MeasuredRanks
from mlxdist.serve.placement import Demands, Layout, choose

FAST, SLOW = (1e-6, 1e10), (1e-2, 1e9)  # latency and bandwidth
LAYERS = 4


def link(ranks, hosts, latency, bandwidth, provider="soft"):
    """An entry of the tuning file."""
    costs = {name: {"latency": latency, "bandwidth": bandwidth} for name in COLLECTIVES}
    return {"provider": provider, "ranks": ranks, "hosts": hosts, "plan": 1e-4, "costs": costs}


def ranks_on(hosts, within=FAST, between=SLOW, room=1e12, gbps=1.0):
    """Measured ranks, each on one of ``hosts``."""
    size = len(hosts)
    known = [link(ranks, 1, *within) for ranks in (2, 3, 4)]
    known += [link(ranks, number, *between) for ranks in (2, 3, 4) for number in range(2, ranks + 1)]
    links = RankLinks(tuple(hosts), dict.fromkeys(combinations(range(size), 2), "soft"), known)
    return MeasuredRanks((gbps,) * size, (room,) * size, links)


EQUAL, PAIRS = ranks_on((0, 0, 0, 0)), ranks_on((0, 0, 1, 1))


@pytest.fixture(scope="module")
def qwen3():
    return tiny_models.build("qwen3", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def two_heads():
    return tiny_models.build("qwen3", num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=LAYERS)


def test_fast_links_between_all_ranks(qwen3):
    placed = choose(qwen3, 4, Layout(), Demands(), EQUAL)
    assert placed.name == "tp=4"
    assert placed.reason.startswith("a token takes ") and "with tp=2 x pp=2 " in placed.reason
    assert placed.reason.endswith("; ep=4, ep=2 x pp=2: the model has no experts that can be on ranks")


def test_a_slow_link_between_two_pairs(qwen3):
    """Behind 8 parts of layers over the slow link, or over the fast one and a message and logits over the slow one; and
    with stages alone four of these, of which each then reads all of its layers."""
    pairs = replace(PAIRS, memory_gbps=(1e-2,) * 4)  # so that reading counts
    placed = choose(qwen3, 4, Layout(), Demands(), pairs)
    assert placed.name == "tp=2 x pp=2"
    cost = DecodeCost(qwen3, replace(pairs, memory_gbps=(1e9,) * 4))
    found = {}
    for tp, pp in ((4, 1), (2, 2), (1, 4)):
        stages = plan_stages(qwen3, pp) if pp > 1 else None
        found[tp] = cost.of(plan_shards(qwen3, tp), stages).seconds
    slow, fast = SLOW[0], FAST[0]
    assert found[4] == pytest.approx(2 * LAYERS * slow, rel=1e-3)
    assert found[2] == pytest.approx(2 * LAYERS * fast + 2 * slow, rel=1e-3)
    assert found[1] == pytest.approx(4 * slow, rel=1e-3)


def test_reading_takes_the_slowest_rank_of_each_stage(qwen3):
    """All of the weights but the embedding, of which one row is read."""
    free = ranks_on((0, 0), within=(1e-12, 1e14))
    embedding = qwen3.model.embed_tokens.weight.nbytes
    plan, stages = plan_shards(qwen3), plan_stages(qwen3, 2)
    seconds = DecodeCost(qwen3, free).of(plan, stages).seconds
    assert seconds == pytest.approx((plan.full_bytes - embedding) / 1e9, rel=1e-6)
    halved = replace(free, memory_gbps=(1.0, 0.5))
    more = DecodeCost(qwen3, halved).of(plan, stages).seconds
    assert more - seconds == pytest.approx(stages.work(1) / 1e9, rel=1e-3)


def test_bytes_that_a_rank_holds(qwen3):
    """The prediction has the bytes that plans of shards, and plans of stages, have for the fullest rank."""
    cost = DecodeCost(qwen3, EQUAL)
    tp, stages, full = plan_shards(qwen3, 4), plan_stages(qwen3, 4), plan_shards(qwen3)
    assert cost.of(tp, None).most == max(map(tp.bytes, range(4))) / tp.full_bytes
    assert cost.of(full, stages).most == max(map(stages.bytes, range(4))) / full.full_bytes


def test_memory_that_fits_with_stages_alone():
    """Each rank that shares layers has the embedding and the head, and a stage one of them."""
    model = tiny_models.build("qwen3", vocab_size=300, tie_word_embeddings=False, num_hidden_layers=LAYERS)
    shared, stage = plan_shards(model, 2).bytes(0), plan_stages(model, 2).bytes(1)
    for room, name in ((1e12, "tp=2"), ((shared + stage) / 2, "pp=2")):
        placed = choose(model, 2, Layout(), Demands(), ranks_on((0, 0), room=room))
        assert placed.name == name
    assert "; tp=2: a rank would need 393.75 KiB for weights and caches, and has 354.62 KiB" in placed.reason
    placed = choose(model, 2, Layout(), Demands(), ranks_on((0, 0), room=stage / 2))  # none fits: as if not measured
    assert (placed.name, placed.reason) == ("tp=2", "")


def test_caches_are_counted():
    """Sliding windows of all requests, which ranks with some of the heads have less of."""
    model = tiny_models.build("gemma3_text")
    room = plan_shards(model).full_bytes
    for requests, fits in ((1, True), (10**6, False)):
        cost = DecodeCost(model, ranks_on((0, 0), room=room), requests, 512)
        estimate = cost.of(plan_shards(model, 2), None)
        assert (estimate.needed < estimate.room) == fits


def test_three_ranks(qwen3):
    """All share the layers, or are stages: there is no other grid."""
    for between, name in ((FAST, "tp=3"), (SLOW, "pp=3")):
        placed = choose(qwen3, 3, Layout(), Demands(), ranks_on((0, 1, 2), between=between))
        assert placed.name == name and placed.reason.count(" ms") == 2


def test_heads_that_do_not_divide(two_heads):
    placed = choose(two_heads, 3, Layout(), Demands(), ranks_on((0, 1, 2), between=FAST))
    assert placed.name == "pp=3" and "; tp=3: heads of model.layers.0.self_attn" in placed.reason
    placed = choose(two_heads, 4, Layout(), Demands(), EQUAL)
    assert placed.name == "tp=2 x pp=2" and "; tp=4: heads of model.layers.0.self_attn" in placed.reason


def test_experts_stay_within_a_host():
    """Experts that are whole on a rank, where an attention of one head cannot be shared."""
    model = tiny_models.build("qwen3_moe", num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=LAYERS)
    placed = choose(model, 4, Layout(), Demands(), PAIRS)
    assert placed.name in ("ep=2 x pp=2", "pp=4") and "with ep=4 " in placed.reason


def test_layers_that_ranks_cannot_share_are_stages():
    placed = choose(tiny_models.build("mamba2", num_hidden_layers=LAYERS), 4, Layout(), Demands(), EQUAL)
    assert placed.name == "pp=4"
    assert "tp=4: a rank would hold 100% of the weights" in placed.reason
    assert "tp=2 x pp=2: the ranks of a stage would hold the same weights" in placed.reason


@pytest.mark.parametrize("option", ["--mtp", "--shard-vocabulary"])
def test_options_for_whole_layers(qwen3, two_heads, option, tmp_path):
    """The choice has no stages; where there is no other, or they are given, the error says what to type."""
    demands = Demands(option)
    for measured in (PAIRS, None):
        placed = choose(qwen3, 4, Layout(), demands, measured)
        assert placed.name == "tp=4" and "pp=" not in placed.reason
        wrong = f"{option} is for ranks that share every layer, not stages; give "
        advice = f"{wrong}-n another number of ranks, or leave out {option}"
        with pytest.raises(InvalidArgument, match=f"^serve: 3 ranks cannot .*: tp=3: heads .*; pp=3: {advice}$"):
            choose(two_heads, 3, Layout(), demands, ranks_on((0, 1, 2)) if measured else None)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"plan": json.loads(plan_shards(qwen3, 2).to_json())}))
    for given in (Layout(tp=2, pipeline=True), Layout(plan=str(plan), pipeline=True)):
        with pytest.raises(
            InvalidArgument, match=f"^serve: .*{wrong}--tp in place of --pipeline, or leave out {option}"
        ):
            choose(qwen3, 4, given, demands)


def test_what_is_given_stays(qwen3):
    for layout, name in (
        (Layout(tp=4), "tp=4"),
        (Layout(pipeline=True), "pp=4"),
        (Layout(rank_shares=[1.0, 1.0, 1.0, 1.0]), "tp=4"),
    ):
        placed = choose(qwen3, 4, layout, Demands(), PAIRS)
        assert (placed.name, placed.reason) == (name, "")


def test_what_is_not_measured(qwen3):
    """Without the exchanges of all ranks the choice is as before; without those of pairs these are no candidate."""
    assert choose(qwen3, 4, Layout()) == choose(qwen3, 4, Layout(tp=4))
    all_ranks = [one for one in PAIRS.links.known if one["ranks"] == 4]
    placed = choose(qwen3, 4, Layout(), Demands(), replace(PAIRS, links=replace(PAIRS.links, known=all_ranks)))
    assert placed.name == "pp=4" and "; tp=2 x pp=2: exchanges between such ranks are not measured" in placed.reason


def test_links_of_one_provider_within_others():
    """Pairs of Macs with a cable each, and Ethernet between the pairs."""
    providers = dict.fromkeys(combinations(range(4), 2), "soft") | {(0, 1): "librdma", (2, 3): "librdma"}
    known = [link(2, 2, *FAST, "librdma"), link(2, 2, *SLOW, "soft"), link(4, 4, *SLOW, "soft+librdma")]
    links = RankLinks((0, 1, 2, 3), providers, known)
    assert links.shape((0, 1)) == ("librdma", 2, 2) and links.shape(range(4)) == ("librdma+soft", 4, 4)
    latencies = [links.costs(ranks).costs["all_sum"].latency for ranks in ((2, 3), (1, 2), range(4))]
    assert latencies == [FAST[0], SLOW[0], SLOW[0]]
    assert links.costs((0, 1, 2)) is None
    ring = replace(links, providers=providers | {(0, 2): "", (1, 3): ""})
    assert ring.shape(range(4)) == ("librdma+soft", 4, 4)


def test_logits_are_sent_in_their_dtype():
    """Stages send them to all ranks: over a slow link a large vocabulary is what takes time."""
    slow = ranks_on((0, 1), between=(1e-6, 1e6), gbps=1e9)
    model = tiny_models.build("qwen3", vocab_size=1000)
    seconds = DecodeCost(model, slow).of(plan_shards(model), plan_stages(model, 2)).seconds
    hidden = model.model.embed_tokens.weight.shape[1]
    assert seconds == pytest.approx((1000 + hidden) * mx.float32.size / 1e6, rel=0.01)
