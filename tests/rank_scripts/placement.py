"""One rank of test_placement.py. Arguments: scenarios, and a directory with models.

Prints "right" after each scenario. Tokens of requests that overlap are compared with mlx-lm's on this process alone.
"""

import os
import sys
from pathlib import Path

# On CPUs MLX calls a C++ compiler for every fused kernel.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MLX_DISABLE_COMPILE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from overlapping import alone, overlapping

import mlxdist
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.nn import load_sharded, plan_shards
from mlxdist.nn.expert_parallel.links import RankLinks
from mlxdist.nn.expert_parallel.policy import COLLECTIVES
from mlxdist.nn.models.load.weight_sources import open_model
from mlxdist.serve.decode_cost import DecodeCost, MeasuredRanks
from mlxdist.serve.placement import Layout, ModelPlacement, place
from mlxdist.serve.worker import BatchLimits, Worker

group = mlxdist.init()
rank, size = group.rank(), group.size()
base = Path(sys.argv[2])


def served(kind: str, stream: bool = False, **layout: object) -> ModelPlacement:
    """Places, loads and serves a model, whose tokens must be those of one process. With ``stream`` rank 0 alone has
    it."""
    directory = base / kind if rank == 0 or not stream else Path("nowhere")
    placement = place(directory, group, Layout(**layout))
    model, tokenizer = load_sharded(
        directory, group=group, plan=placement.plan, stage_plan=placement.stage_plan, stream=stream
    )
    expected = alone(load(str(base / kind))[0])
    worker = Worker(model, tokenizer, BatchLimits(prefill_step_size=4))
    worker.warm_up()
    found, cached = overlapping(worker, expected[0])
    assert found == expected, f"{kind}, {placement.name}: {found}, not {expected}"
    assert cached > 0
    worker.close()
    return placement


def given() -> None:
    uneven = served("qwen3", rank_shares=[2.0, 1.0])
    assert uneven.name == "tp=2" and uneven.plan.bytes(0) > 1.2 * uneven.plan.bytes(1)
    experts = served("qwen3_moe", ep=2)
    assert experts.name == "ep=2" and sum(shard.kind == "experts" for shard in experts.plan.sharded) > 0
    stages = served("qwen3", pipeline=True, rank_shares=[3.0, 1.0])
    assert stages.name == "pp=2" and [len(stages.stage_plan.layers(stage)) for stage in (0, 1)] == [3, 1]
    print("right")


def files() -> None:
    """A plan in a file of rank 0, and a model that rank 0 alone has."""
    directory, file = (base / "qwen3", base / "plan.json") if rank == 0 else (Path("nowhere"), Path("nowhere.json"))
    plan = place(directory, group, Layout(rank_shares=[2.0, 1.0])).plan
    assert served("qwen3", stream=True, plan=str(file)).plan == plan
    print("right")


def grids() -> None:
    """On four ranks, two of which are a stage."""
    assert served("qwen3", pipeline=True, tp=2).name == "tp=2 x pp=2"
    assert served("qwen3_moe", pipeline=True, ep=2, stream=True).name == "ep=2 x pp=2"
    print("right")


def chosen() -> None:
    """Tensor parallelism where it shards most of the weights, stages where it shards nothing or is refused."""
    assert served("qwen3") == place(base / "qwen3", group, Layout(tp=2))
    recurrent = served("mamba2")
    assert recurrent.name == "pp=2"
    assert "tp=2: a rank would hold 100% of the weights; ep=2: the model has no experts" in recurrent.reason
    headless = served("one_head")
    assert headless.name == "pp=2" and "tp=2: heads of model.layers.0.self_attn" in headless.reason
    os.environ["MLXDIST_RANK_SHARES_MEMORY"] = "3,1"
    assert served("qwen3").plan.rank_shares == (3.0, 1.0)
    assert place(base / "mamba2", group, Layout()).stage_plan.rank_shares == (3.0, 1.0)
    assert place(base / "qwen3", group, Layout(rank_shares=[1.0, 1.0])).plan.rank_shares is None
    os.environ["MLXDIST_RANK_SHARES_MEMORY"] = "1,1"
    assert place(base / "qwen3", group, Layout()).plan.rank_shares is None
    print("right")


def counted() -> None:
    """A decode step adds up results as often as is predicted: of links that take a second for each."""
    costs = dict.fromkeys(COLLECTIVES, {"latency": 1.0, "bandwidth": 1e15})
    known = [{"provider": "soft", "ranks": 2, "hosts": 1, "plan": 1.0, "costs": costs}]
    measured = MeasuredRanks((1e9, 1e9), (1e12, 1e12), RankLinks((0, 0), {(0, 1): "soft"}, known))
    for kind, tp, ep in (("qwen3", 2, 1), ("qwen3_moe", 2, 1), ("qwen3_moe", 1, 2)):
        model, _, _ = open_model(Checkpoint(base / kind))
        plan = plan_shards(model, tp, ep)
        seconds = DecodeCost(model, measured).of(plan, None).seconds
        model, _ = load_sharded(base / kind, group=group, plan=plan)
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([[1]]), cache=caches))
        before = group.stats_by_operation()["all_sum"]["calls"]
        mx.eval(model(mx.array([[1]]), cache=caches))
        calls = group.stats_by_operation()["all_sum"]["calls"] - before
        assert abs(seconds - calls) < 1e-3 and calls > 2, f"{kind}, tp={tp}, ep={ep}: {calls}, not {seconds}"
    print("right")


def refused() -> None:
    """The same sentence on all ranks, which can go on."""
    broken = base / "broken.json"
    if rank == 0:
        broken.write_text('{"plan": {"tp": 2}}')
    for words, kind, layout in (
        ("the 2 ranks are not tp=3 times ep=1; with --pipeline", "qwen3", {"tp": 3}),
        ("the 2 ranks cannot be equal stages of tp=1 times ep=3", "qwen3", {"ep": 3, "pipeline": True}),
        ("ep=2: the model has no experts", "qwen3", {"ep": 2}),
        ("tp=2: heads of model.layers.0.self_attn", "one_head", {"tp": 2}),
        ("rank_shares must be 2 numbers, one per rank, not [1.0, 2.0, 3.0]", "qwen3", {"rank_shares": [1.0, 2.0, 3.0]}),
        ("needs a job whose hosts are measured", "qwen3", {"rank_shares": "compute"}),
        ("the plan has its tp, ep and rank shares", "qwen3", {"plan": str(broken), "tp": 2}),
        ("what `mlxdist shard --json` prints: FileNotFoundError", "qwen3", {"plan": str(base / "none.json")}),
        ("what `mlxdist shard --json` prints: InvalidArgument", "qwen3", {"plan": str(broken)}),
        ("2 ranks cannot share this model: tp=2: heads of", "one_layer", {}),
    ):
        try:
            place(base / kind, group, Layout(**layout))
        except mlxdist.InvalidArgument as error:
            assert str(error).startswith("serve: ") and words in str(error), error
        else:
            raise AssertionError(f"{layout} of {kind} was not refused")
        group.barrier()
    print("right")


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
