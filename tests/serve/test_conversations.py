"""Random conversations on 1, 2 and 3 ranks with unequal shares, in a prefix cache that is too small for all of them:
every answer is that of one process without a cache.

`--conversations=1000` has about as many in all, which is what a release is tried with.
"""

import json

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from serving import save_adapters, save_model_folder

from mlxdist.serve.quantized_cache import quantize_caches

pytestmark = pytest.mark.long
# Heads that ranks can share unequally.
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SHARES = {1: None, 2: [3, 1], 3: [2, 1, 1]}
CASES = [("qwen3", None), ("qwen3", 8), ("qwen3_next", None), ("gemma3_text", None)]


@pytest.mark.parametrize("ranks", SHARES)
@pytest.mark.parametrize("kind, bits", CASES)
def test_answers_are_those_without_a_cache(run_ranks, pytestconfig, tmp_path, kind, bits, ranks):
    """With branches, edits of earlier turns, and requests that are cancelled or end with a stop word."""
    model = save_model_folder(tmp_path / "model", kind, **SIZES)
    adapters = []
    if (kind, bits) == ("qwen3", None):
        adapters = [str(save_adapters(tmp_path / f"adapter {seed}", model, seed)) for seed in (1, 2)]
    count = -(-pytestconfig.getoption("--conversations") // (len(CASES) * len(SHARES)))
    plan = {"adapters": adapters, "shares": SHARES[ranks], "bits": bits, "seed": count + ranks, "conversations": count}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run_ranks(
        "serving_conversations.py",
        ranks,
        model,
        tmp_path / "plan.json",
        tmp_path / "answers.json",
        timeout=120 + 20 * count,
        environment={"MLX_DISABLE_COMPILE": "1"},
    )
    loaded = [load(str(model), adapter_path=path)[0] for path in (None, *adapters)]
    for each in loaded if bits else ():
        quantize_caches(each, 32, bits)
    requests = json.loads((tmp_path / "answers.json").read_text())
    assert len(requests) >= count
    for adapter, prompt, answer in requests:
        if answer:
            cache = make_prompt_cache(loaded[adapter])
            steps = generate_step(mx.array(prompt), loaded[adapter], max_tokens=len(answer), prompt_cache=cache)
            assert answer == [token for token, _ in steps], (adapter, prompt)
