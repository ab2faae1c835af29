"""Random conversations on 1, 2 and 3 ranks with unequal shares, and on 2 and 3 stages, in a prefix cache that is too
small for all of them, half of the runs with a disk tier: every answer is that of one process without a cache.

`--conversations=1000` has about as many in all, which is what a release is tried with.
"""

import json

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from rounding import SEEDS, rounded_again
from serving import save_adapters, save_model_folder

from mlxdist.serve.quantized_cache import quantize_caches

pytestmark = pytest.mark.long
# Heads that ranks can share unequally.
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
LAYOUTS = {  # ranks, and options of load_sharded
    "1 rank": (1, {}),
    "2 ranks": (2, {"rank_shares": [3, 1]}),
    "3 ranks": (3, {"rank_shares": [2, 1, 1]}),
    "2 stages": (2, {"pp": 2}),
    "3 stages": (3, {"pp": 3}),
}
CASES = [("qwen3", None), ("qwen3", 8), ("qwen3_next", None), ("gemma3_text", None)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind, bits", CASES)
def test_answers_are_those_without_a_cache(run_ranks, pytestconfig, tmp_path, kind, bits, layout):
    """With branches, edits of earlier turns, and requests that are cancelled or end with a stop word."""
    model = save_model_folder(tmp_path / "model", kind, **SIZES)
    adapters = []
    if (kind, bits) == ("qwen3", None):
        adapters = [str(save_adapters(tmp_path / f"adapter {seed}", model, seed)) for seed in (1, 2)]
    count = -(-pytestconfig.getoption("--conversations") // (len(CASES) * len(LAYOUTS)))
    ranks, options = LAYOUTS[layout]
    has_disk = (CASES.index((kind, bits)) + list(LAYOUTS).index(layout)) % 2
    plan = {
        "adapters": adapters,
        "options": options,
        "bits": bits,
        "disk": str(tmp_path / "disk") if has_disk else None,
    }
    plan |= {"seed": f"{count} {kind} {bits} {layout}", "conversations": count}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    printed = run_ranks(
        "serving_conversations.py",
        ranks,
        model,
        tmp_path / "plan.json",
        tmp_path / "answers.json",
        timeout=120 + 20 * count,
        environment={"MLX_DISABLE_COMPILE": "1"},
    )
    print(printed[0])
    loaded = [load(str(model), adapter_path=path)[0] for path in (None, *adapters)]
    for each in loaded if bits else ():
        quantize_caches(each, 32, bits)
    requests = json.loads((tmp_path / "answers.json").read_text())
    assert len(requests) >= count
    close = 0
    for adapter, prompt, answer in requests:
        if answer:
            model, cache = loaded[adapter], make_prompt_cache(loaded[adapter])
            steps = generate_step(mx.array(prompt), model, max_tokens=len(answer), prompt_cache=cache)
            for place, (token, (expected, logprobs)) in enumerate(zip(answer, steps)):
                if token != expected:
                    gap = (logprobs[expected] - logprobs[token]).item()
                    moved = moved_by_rounding(model, prompt + answer[:place], expected, token)
                    assert gap <= moved, (adapter, prompt, place)
                    close += 1
                    break
    print(f"{len(requests)} requests compared, {close} of them up to two tokens that rounding may choose between")


def moved_by_rounding(model: nn.Module, tokens: list[int], *pair: int) -> float:
    """How far the difference of a pair's logits moves if each weight is rounded up or down by one more bit; where keys
    and values have 8 bits, those that are rounded to another step move it by thousandths and more."""
    weights, differences = model.parameters(), []
    for each in (weights, *(rounded_again(weights, seed) for seed in SEEDS)):
        model.update(each)
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
        differences.append((logits[pair[0]] - logits[pair[1]]).item())
    model.update(weights)
    return max(abs(each - differences[0]) for each in differences)
