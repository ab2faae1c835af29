"""Counts what the loop of `mlxdist serve` communicates, without HTTP: one broadcast of 1 KiB per step, and the model's.

Arguments: the model's folder; "diverge" where rank 1 is to sample with another seed; "full" where it has no memory.
"""

import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx_lm.generate import make_text_state_machine
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments

import mlxdist
from mlxdist.nn import load_sharded
from mlxdist.serve.answer import Answer
from mlxdist.serve.decisions import FRAME, Admission, Decisions
from mlxdist.serve.memory import cache_memory
from mlxdist.serve.metrics import Metrics
from mlxdist.serve.scheduler import Request, Scheduler
from mlxdist.serve.worker import BatchLimits, Worker

group = mlxdist.init()
own = group.split(0)
model, tokenizer = load_sharded(sys.argv[1], group=group)
if "full" in sys.argv[2:]:
    mx.set_memory_limit(1 if group.rank() == 1 else 1 << 30)
    cache_memory(model, 8, 64, group)
worker = Worker(model, tokenizer, BatchLimits(prefill_step_size=64))


def collectives(of, function):
    """Of a group, while ``function`` runs; all that it has started is awaited."""
    before = of.stats()
    function()
    mx.synchronize()
    after = of.stats()
    return after["collectives"] - before["collectives"], after["payload_bytes_sent"] - before["payload_bytes_sent"]


scheduler = Scheduler(8, 8, heartbeat=0.01, metrics=Metrics())
sampling, logits = SamplingArguments(0.8, 1.0, 0, 0.0, 0.0, 0.1), LogitsProcessorArguments(None, *[0.0, 20] * 3)


def request_of(tokens, first=2):
    prompt = [first + i % 200 for i in range(tokens)]
    admission = Admission(-1, prompt, [tokens], max_tokens=60, seed=7, sampling=sampling, logits=logits)
    answer = Answer(tokenizer.detokenizer, make_text_state_machine(tokenizer), "normal", [])
    return Request(admission, answer, timeout=60)


requests = [request_of(tokens) for tokens in (4, 40, 400)]
size = FRAME


def step(number):
    global size
    message = np.zeros(size, np.uint8)
    if group.rank() == 0:
        if number < len(requests):
            scheduler.submit(requests[number])
        message = np.frombuffer(scheduler.decide(number, size, worker.digest).encode(size), np.uint8)
    decisions = Decisions.decode(mlxdist.broadcast(message, group=own).tobytes())
    if len(sys.argv) > 2 and group.rank() == 1:
        decisions = replace(decisions, admit=[replace(request, seed=8) for request in decisions.admit])
    outcome = worker.step(decisions)
    if group.rank() == 0:
        scheduler.deliver(outcome)
    size = decisions.next_size


sizes = []
for number in range(14):
    sizes.append(size)
    count, nbytes = collectives(own, lambda: step(number))
    assert count == 1, count
    if group.rank() == 0:
        assert nbytes == sizes[-1], (nbytes, sizes)
assert sorted(sizes)[-2:] == [FRAME, FRAME + 4 * 400] and sizes.count(FRAME) == 13, sizes

# Three requests generate now, and a step is one call of the model.
cache = make_prompt_cache(model)
alone, _ = collectives(group, lambda: mx.eval(model(mx.array([[3]]), cache=cache)))
for number in range(14, 20):
    count, _ = collectives(group, lambda: step(number))
    assert count == alone, (count, alone)

# A short prompt comes while one of 4,000 tokens is computed: its first token is there after two chunks of that.
long, short = request_of(4000), request_of(4, first=9)
if group.rank() == 0:
    scheduler.submit(long)
for number in range(20, 25):
    step(number)
if group.rank() == 0:
    scheduler.submit(short)
    before = long.events.qsize()
for number in range(25, 28):
    step(number)
if group.rank() == 0:
    assert len(short.generated) == 1 and not long.generated, (short.generated, long.generated)
    assert before >= 3 and long.events.qsize() == before + 2, (before, long.events.qsize())
print(f"{alone} collectives of the model and 1 of the server in a step: ok")
