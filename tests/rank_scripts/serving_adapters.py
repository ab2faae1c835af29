"""Computes requests with several adapters in one batch, without HTTP, and compares their tokens with those expected.

Arguments: the model's folder; how many stages; a JSON file with the adapters' folders and the requests, each with the
step in which it is admitted, the tokens that are expected, and how many of its prompt the prefix cache has.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments

import mlxdist
from mlxdist.nn import load_sharded
from mlxdist.serve.adapters import AdaptedModel
from mlxdist.serve.decisions import Admission, Decisions
from mlxdist.serve.worker import BatchLimits, Worker

folder, stages, plan = sys.argv[1], int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
group = mlxdist.init()
model, tokenizer = load_sharded(folder, group=group, pp=stages, adapter_path=plan["adapters"])
worker = Worker(AdaptedModel(model), tokenizer, BatchLimits(prefill_step_size=16))
assert worker.warm_up() > 0
sampling, logits = SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1), LogitsProcessorArguments(None, *[0.0, 20] * 3)
found, cached, left, end, step = {}, {}, set(), [], 0
while left or step <= max(request["step"] for request in plan["requests"]):
    admit = []
    for number, request in enumerate(plan["requests"]):
        if request["step"] == step:
            prompt, chosen = request["prompt"], replace(sampling, temperature=request["temperature"])
            fixed = {"max_tokens": request["max_tokens"], "seed": request["seed"], "adapter": request["adapter"]}
            admit.append(Admission(number, prompt, [len(prompt)], sampling=chosen, logits=logits, **fixed))
    outcome = worker.step(Decisions(step, worker.digest, end, admit))
    cached |= outcome.cached
    left |= {request.number for request in admit}
    for response in outcome.tokens:
        found.setdefault(response.uid, []).append(response.token)
    end = [(response.uid, 2**32 - 1) for response in outcome.tokens if response.finish_reason is not None]
    left -= {number for number, _ in end}
    step += 1
worker.close()
for number, request in enumerate(plan["requests"]):
    assert found[number] == request["expected"], (number, request["adapter"], found[number], request["expected"])
    assert cached[number] == request["cached"], (number, cached[number], request["cached"])
mx.synchronize()
print(f"{len(found)} requests: ok")
