"""A token through a decoder of sharded layers: split blocks, and each operation submitted by itself."""

import mlx.core as mx
from common import LARGE, driver_calls, group, median_seconds, report, require, size
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlxdist.nn import SplitModel, plan_shards, shard_model, submissions

LAYERS, HIDDEN = (16, 2048) if LARGE else (2, 64)
PROMPT = mx.arange(7)[None]


def model() -> llama.Model:
    args = llama.ModelArgs(
        model_type="llama", hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=3 * HIDDEN,
        num_attention_heads=16, num_key_value_heads=8, rms_norm_eps=1e-5, vocab_size=1000,
    )  # fmt: skip
    mx.random.seed(3)
    made = llama.Model(args)
    mx.eval(made.parameters())
    return made


def sharded() -> llama.Model:
    made = model()
    shard_model(made, plan_shards(made, tp=size), group=group)
    return made


def tokens(made: object) -> tuple[float, float, dict, mx.array]:
    """Microseconds and submissions of a layer and token, CUDA's calls of a layer, and the prompt's last logits."""
    cache = make_prompt_cache(made)
    logits = made(PROMPT, cache=cache)[:, -1]
    mx.eval(logits)
    token = mx.array([[1]])

    def step() -> None:
        mx.eval(made(token, cache=cache))

    seconds = median_seconds(step, 15)
    with submissions() as count:
        step()
    with driver_calls() as calls:
        step()
    per_layer = {name: round(number / LAYERS, 2) for name, number in calls.most_common(6)}
    return round(seconds / LAYERS * 1e6, 1), (count.submitted - 1) / LAYERS, per_layer, logits


_, _, alone_calls, wanted = tokens(whole := model())
alone = tokens(whole)[0]
del whole
makers = {
    "each operation in one graph": sharded,
    "split blocks, two submissions a layer": lambda: SplitModel.from_model(model(), group=group, submit=True),
    "split blocks, one graph": lambda: SplitModel.from_model(model(), group=group, submit=False),
}
figures = {"one process, us a layer": alone, "one process, driver calls a layer": alone_calls}
for name, make in makers.items():
    microseconds, submitted, calls, logits = tokens(make())
    require(logits, wanted, name, 1e-3)
    assert submitted == (2 if "two submissions" in name else 0), (name, submitted)
    figures |= {f"{name}, us a layer": microseconds, f"{name}, submissions a layer": submitted}
    figures[f"{name}, driver calls a layer"] = calls
report(layers=LAYERS, hidden=HIDDEN, **figures)
