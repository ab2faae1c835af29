"""`mlxdist serve` on two ranks with eight streams at a time, against mlx-lm on one process. Argument: a folder."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import mlx.core as mx
import serving
from mlx_lm import load, stream_generate

STREAMS, TOKENS = 8, 24
GPU = mx.default_device().type == mx.DeviceType.gpu
if GPU:
    del serving.ENVIRONMENT["MLX_DISABLE_COMPILE"]

folder = serving.save_model_folder(Path(sys.argv[1]))
prompts = [f"{number} question of a client" + " who asks at length" * (number % 4) for number in range(STREAMS)]
model, tokenizer = load(str(folder))
expected = []
for prompt in prompts:
    made = stream_generate(model, tokenizer, prompt, max_tokens=TOKENS)
    expected.append("".join(response.text for response in made).rstrip("\ufffd"))
with (
    serving.ServerProcess(folder, 2, "--decode-concurrency", STREAMS) as server,
    ThreadPoolExecutor(STREAMS) as threads,
):
    ask = lambda prompt: server.text(prompt, TOKENS).rstrip("\ufffd")
    assert list(threads.map(ask, prompts)) == expected
    begin = time.perf_counter()
    assert list(threads.map(ask, prompts)) == expected
    rate = STREAMS * TOKENS / (time.perf_counter() - begin)
    assert server.stop() == 0, "".join(server.lines)
print("FIGURES", json.dumps({"streams": STREAMS, "tokens a second, all streams": round(rate)}))
