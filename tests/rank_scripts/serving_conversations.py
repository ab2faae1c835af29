"""Computes random conversations without HTTP, with a prefix cache that is too small for them, and writes the answers.

Arguments: the model's folder; a JSON file with the adapters' folders, options of load_sharded, the number of bits of
KV caches or null, the folder of a disk tier or null, the seed and the number of conversations; a file for rank 0 to
write a list of [adapter, prompt, answer] to.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from overlapping import ALL, GREEDY, admission
from waiting import wait_for

import mlxdist
from mlxdist.nn import load_sharded
from mlxdist.runtime.operations.collectives import all_gather
from mlxdist.serve.adapters import AdaptedModel
from mlxdist.serve.decisions import Admission, Decisions
from mlxdist.serve.memory import cache_memory
from mlxdist.serve.prefix_disk import PrefixDisk
from mlxdist.serve.quantized_cache import quantize_caches
from mlxdist.serve.worker import BatchLimits, Worker

RUNNING, LONGEST, ANSWER, CACHE = 4, 240, 10, 350  # requests, and tokens
DISK, STATES = 800, 30  # tokens on disk, and states


class CountingDisk(PrefixDisk):
    reads = 0

    def read(self, keys):
        self.reads += len(keys)
        return super().read(keys)


folder, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
group = mlxdist.init()
own = group.split(0)  # as a server has it: MLX computes a token ahead in the other
adapters = plan["adapters"]
model, tokenizer = load_sharded(folder, group=group, adapter_path=adapters or None, **plan["options"])
if plan["bits"]:
    quantize_caches(model, 32, plan["bits"])
model = AdaptedModel(model) if adapters else model
limits = BatchLimits(RUNNING, prefill_step_size=16, prompt_cache_tokens=CACHE, snapshot_interval=32)
worker = Worker(model, tokenizer, limits)
memory = cache_memory(model, RUNNING, 16, group, max_total_tokens=RUNNING * (LONGEST + ANSWER) + 300)
worker.limit(memory)
disk = None
if plan["disk"]:
    of_token, of_states = memory.costs
    disk = CountingDisk(plan["disk"], int(DISK * of_token + STATES * of_states), group, hourly=1 << 40)
    worker.open_disk(disk, disk.open({}), own)

choose = random.Random(plan["seed"])  # the same on all ranks
systems = [[choose.randrange(96) for _ in range(count)] for count in (0, 20, 70)]
said: list[tuple[int, list[int], list[int]]] = []  # adapter, prompt and answer of requests that have ended
running: dict[int, Admission] = {}
answers: dict[int, list[int]] = {}
given_up: dict[int, int] = {}  # the length of an answer at which its request is cancelled
requests = 8 * plan["conversations"]
begun = number = step = hits = most = 0


def words() -> list[int]:
    return [choose.randrange(96) for _ in range(choose.choice([1, 5, 16, 40]))]


def next_request() -> tuple[int, list[int], int]:
    """Adapter and prompt: a new conversation, the next turn of one, another branch of it, or one edited before its
    end. And whether it is a new one."""
    kind = choose.choice(["new", "turn", "turn", "turn", "branch", "edit"])
    if begun < 2 or kind == "new" and begun < plan["conversations"]:
        return choose.randrange(1 + len(adapters)), choose.choice(systems) + words(), 1
    adapter, prompt, answer = choose.choice(said[-12:])
    whole = prompt + answer
    if kind == "turn":
        whole += words()
    else:
        place = choose.randrange(1, len(whole))
        whole = whole[:place] + words() + (whole[place + 2 :] if kind == "edit" else [])
    return adapter, whole if len(whole) <= LONGEST else whole[: choose.randrange(1, LONGEST)], 0


end: list[tuple[int, int]] = []
while number < requests or running:
    admit = []
    if number < requests and len(running) < RUNNING and (said or begun < 2):
        adapter, prompt, is_new = next_request()
        first = choose.randrange(1, len(prompt) + 1)
        segments = [each for each in (first, len(prompt) - first) if each]
        made = admission(number, prompt, sampling=GREEDY, adapter=adapter)
        admit.append(replace(made, segments=segments, max_tokens=ANSWER))
        running[number], answers[number], begun, number = admit[0], [], begun + is_new, number + 1
        if choose.random() < 0.2:
            given_up[number - 1] = choose.randrange(ANSWER)
    outcome = worker.step(Decisions(step, worker.digest, end, admit))
    hits += sum(outcome.cached.values())
    most = max(most, worker.cache.tokens)
    assert worker.cache.tokens <= CACHE
    if step % 3 == 0:
        assert disk is None or wait_for(lambda: not disk._pending)  # what is read depends on no clock
        worker.compare(all_gather(worker.report(), group=own).reshape(own.size(), -1))
    end, step = [], step + 1
    for response in outcome.tokens:
        answers[response.uid].append(response.token)
        if response.finish_reason is not None:
            end.append((response.uid, ALL))
    for request in [each for each in given_up if len(answers[each]) > given_up[each] or choose.random() < 0.02]:
        if request not in dict(end):  # a client has left, or there is a stop word two tokens before
            most_kept = max(1, len(running[request].prompt) + len(answers[request]) - 2)
            end.append((request, choose.choice([ALL, most_kept])))
        del given_up[request]
    for request, _ in end:
        given_up.pop(request, None)
        asked = running.pop(request)
        said.append((asked.adapter, list(asked.prompt), answers.pop(request)))
worker.close()
if disk is not None:
    disk.close()
    assert disk.reads > 0
assert hits > 10 * plan["conversations"] and most > CACHE - 100, (hits, most)
if group.rank() == 0:
    Path(sys.argv[3]).write_text(json.dumps(said))
found = f"{len(said)} requests, {hits} tokens from the cache, {disk.reads if disk else 0} parts read from the disk"
print(f"{found}: ok")
