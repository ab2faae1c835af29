"""Writes docs/models.md: what plan_shards shards of every model file of the installed mlx-lm.

Run `python tests/support/model_table.py` when mlx-lm or the patterns have changed; tests/nn/test_shard_model.py compares.
"""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tiny_models

from mlxdist.nn.models.plan import Plan, Shard, plan_shards
from mlxdist.nn.models.plan.shard_model import why_not_trained
from mlxdist.serve.request_cache import cannot_be_batched
from mlxdist.serve.worker import PROMPTS_ALONE, REQUESTS_ALONE

FILE = Path(__file__).parents[2] / "docs" / "models.md"
# Reasons that are the same for all models.
COMMON = ("vocabulary", "a norm, small", "routes all tokens", "added once", "its share")
HEAD = """# Models

<!-- Written by tests/support/model_table.py. -->

What [`plan_shards`](reference/nn.md#mlxdist.nn.plan_shards) shards of each model file of mlx-lm {version}, here with `tp=2` and a tiny
configuration: {cut} of {files} files. "shard()" is the model's own method, "patterns" are mlxdist's. The share of the
parameters' bytes that each rank holds counts layers, without the vocabulary (embedding and output), which stays
unsharded.
Norms and routers stay unsharded too; what else does is in the last column. A shard that stays unsharded is
computed by each rank, so that the model is right all the same: `tests/nn/test_shard_model.py` compares the logits of every
model with those of the model that is not sharded, in prefill and in decoding with a cache, except where the last column
says "not compared". A model that "trains" has the gradients of the model that is not sharded: `tests/nn/test_training.py`
compares those of every parameter on 2 ranks, of the common families on 3 as well, and what 20 steps of AdamW make of
these. Where that column says "rejected", a gradient of the sharded model is an error with that reason.

[`mlxdist serve`](serve.md) serves {served} of them: `tests/serve/test_served_models.py` compares the tokens of overlapping
requests, of which one is cancelled and one has a cached prefix, on 2 ranks with those that mlx-lm generates for each alone on one
process. Of some, mlx-lm's batches fail, or give other tokens than a request alone: of these, `mlxdist serve` computes prompts,
or requests, one at a time.

| model file | how | what is sharded | share | trains | served | what stays unsharded, and why |
|---|---|---|---|---|---|---|
"""


def write() -> str:
    """The text of docs/models.md."""
    rows, cut = [], 0
    for name in (files := tiny_models.model_files()):
        if name in tiny_models.NOT_IMPORTED:
            rows.append((name, "", "", "", "", "", f"not compared: {tiny_models.NOT_IMPORTED[name]}"))
            continue
        plan = plan_shards(model := tiny_models.build(name), tp=2)
        cut += bool(plan.sharded)
        how = {"model.shard()": "shard()"}.get(plan.how, plan.how) if plan.sharded else "not sharded"
        alone = cannot_be_batched(model, name)
        trains = _trains(name, why_not_trained(model, plan))
        shares = ", ".join(_blocks(plan.sharded)), f"{_share(plan):.0%}"
        rows.append((name, how, *shares, trains, _served(name, alone), _whole(name, plan)))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    served = sum(row[5].startswith("yes") for row in rows)
    return HEAD.format(version=version("mlx-lm"), cut=cut, files=len(files), served=served) + table


def _trains(name: str, refused: str | None) -> str:
    if refused:
        return f"rejected: {refused}"
    reason = (tiny_models.NOT_COMPARED | tiny_models.NOT_TRAINED).get(name)
    return f"not compared: {reason}" if reason else "yes"


def _served(name: str, alone: bool) -> str:
    if name in tiny_models.NOT_COMPARED:
        return "not compared"
    found = {"prompts": name in PROMPTS_ALONE, "requests": alone or name in REQUESTS_ALONE}
    return ", ".join(["yes", *(f"{what} one at a time" for what, is_so in found.items() if is_so)])


def _blocks(shards: list[Shard]) -> list[str]:
    """The names of the modules in which the layers are: "self_attn", "mlp"."""
    layers = ("weight", "scales", "biases", "bias")
    paths = [[part for part in shard.path.split(".") if not part.isdigit()] for shard in shards]
    return list(
        dict.fromkeys(([""] + (path[:-2] if path[-1] in layers else path[:-1]))[-1] or path[0] for path in paths)
    )


def _share(plan: Plan) -> float:
    layers = [shard for shard in plan.shards.values() if "vocabulary" not in shard.reason]
    whole = sum(Shard(one.path, "full", one.shape, one.dtype).bytes(0) for one in layers)
    return max(sum(one.bytes(rank) for one in layers) for rank in range(plan.ranks)) / whole


def _whole(name: str, plan: Plan) -> str:
    reasons: dict[str, list[Shard]] = {}
    for shard in plan.shards.values():
        if not shard.ranges and not any(words in shard.reason for words in COMMON):
            reasons.setdefault(shard.reason, []).append(shard)
    texts = [f"{', '.join(_blocks(shards))}: {reason}" for reason, shards in reasons.items()]
    if name in tiny_models.NOT_COMPARED:
        texts.append(f"not compared: {tiny_models.NOT_COMPARED[name]}")
    return "; ".join(texts)


if __name__ == "__main__":
    FILE.write_text(write())
