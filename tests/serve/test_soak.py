"""A server for hours, in short: random requests of all kinds by clients of four APIs, and nothing differs or grows.

`--soak-requests=2000` has as many for each server, which is what a release is tried with.
"""

import contextlib
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from four_apis import APIS, BODIES, CHAT, LACKS, TEXT, clients_of
from mlx_lm import load, stream_generate
from mtp_models import KINDS, save_mtp_folder
from rounding import SEEDS, rounded_again
from serving import ServerProcess, post, random_request, save_adapters, save_model_folder
from waiting import late, wait_for

from mlxdist.tools.bench.byte_model import save_byte_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")]
CLIENTS = 12
OPTIONS = ("--prefill-step-size", 64, "--prompt-cache-tokens", 1000)
QUANTIZED = ["--kv-bits", 8, "--kv-group-size", 32]
ADAPTERS = ("first", "second")  # their names
RESIDENT = 24 << 20  # bytes of a process that are no leak: Python's heap and MLX's cache have their own sizes
ACTIVE = 16 << 10  # bytes of MLX, of which all are counted
# mlx-lm reads calls of tools between two tokens of this template.
TEMPLATE = (
    "{% for message in messages %}<|message|>{{ message.content or '' }}{% for tool_call in message.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}{% endfor %}{{ tools or '' }}<|message|>"
)
CALL, CALL_END = 258, 259  # these tokens
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMARS = [
    {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}},
    {"structured_outputs": {"regex": "(yes|no), [a-f]{1,9}"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "record", "schema": RECORD}}},
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": RECORD}}
    for name in ("find", "greet")
]


class Models:
    """Folders of models, each made when a test first asks for it."""

    def __init__(self, folder):
        self._folder = folder

    def __call__(self, kind, seed=1):
        folder = self._folder / kind / str(seed) / "tiny"
        if not folder.exists():
            fields = {"vocab_size": CALL_END + 1, "max_position_embeddings": 2048}
            save = save_mtp_folder if kind in KINDS else save_model_folder
            save(folder, kind, seed, **(fields | {"head_dim": 32} if kind == "qwen3" else fields))
            save_byte_tokenizer(folder, "<|end|>", ["<|message|>", "<tool_call>", "</tool_call>"], TEMPLATE)
        return folder

    def options(self, kind, *options):
        """The options of a server. It answers by names of ADAPTERS where they ask for adapters."""
        names = {
            "DRAFT": [self(kind, seed=2)],
            "ADAPTERS": [f"--adapter={name}={path}" for name, path in self._adapters(kind)],
        }
        return [each for option in options for each in names.get(option, [option])]

    def _adapters(self, kind):
        paths = [self._folder / kind / name for name in ADAPTERS]
        for seed, path in enumerate(paths):
            if not path.exists():
                save_adapters(path, self(kind), seed)
        return zip(ADAPTERS, paths)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


def random_chat(generator):
    """A chat that may have a history, tools, stop words, and calls that the model writes badly."""
    words = lambda: " ".join(generator.choices(["alpha", "beta", "gamma", "delta"], k=generator.choice([1, 4, 20])))
    messages = [{"role": "system", "content": "be brief"}] if generator.random() < 0.5 else []
    for _ in range(generator.choice([0, 0, 1])):
        messages += [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]
    body = {"messages": [*messages, {"role": "user", "content": words()}], "max_tokens": generator.choice([1, 8, 30])}
    if generator.random() < 0.4:
        body["tools"] = TOOLS[: generator.choice([1, 2])]
        named = {"type": "function", "function": {"name": "find"}}
        body["tool_choice"] = generator.choice(["none", "auto", "auto", "required", named])
        if body["tool_choice"] in ("required", named):
            body["max_tokens"] = 120
        else:
            body["logit_bias"] = {str(CALL): generator.choice([0, 8, 12]), str(CALL_END): generator.choice([0, 8])}
    if generator.random() < 0.3:
        body["stop"] = [chr(generator.randrange(97, 123)), "never said"]
    if generator.random() < 0.2:
        body |= {"temperature": 1.0, "seed": generator.getrandbits(32)}
    return body


def random_question(generator):
    """An API, and what it is asked: a chat as /v1/chat/completions has it, or a completion."""
    api = generator.choice(APIS)
    body = random_request(generator) if api == TEXT else random_chat(generator)
    if "tools" not in body and generator.random() < 0.2:
        body |= generator.choice(GRAMMARS)
    return api, {name: value for name, value in body.items() if name not in LACKS.get(api, ())}


@pytest.fixture(scope="module")
def questions(models, pytestconfig):
    """A function: random requests, each with the answer of one process that has nothing else to do, to all chats by
    the same API."""
    found = {}
    generator = random.Random(pytestconfig.getoption("--choice") or 7)
    asked = [random_question(generator) for _ in range(pytestconfig.getoption("--soak-requests"))]
    named = [(api, body | {"model": generator.choice(["tiny", *ADAPTERS])}) for api, body in asked]

    def answered(kind="qwen3", *options):
        if (kind, options) not in found:
            with (
                ServerProcess(models(kind), 1, *OPTIONS, *models.options(kind, *options)) as one,
                clients_of(one) as to,
            ):
                given = named if "ADAPTERS" in options else asked
                answers = [to.ask(TEXT if api == TEXT else CHAT, body, False) for api, body in given]
                found[kind, options] = [(*each, answer) for each, answer in zip(given, answers)]
        return found[kind, options]

    return answered


def test_the_questions_are_of_all_kinds(questions):
    """Answers that end by themselves, by a stop word or a grammar, by their length, and with calls of tools."""
    answers = [answer for _, _, answer in questions()]
    assert {reason for _, _, reason, _ in answers} == {"stop", "length", "tool_calls"}
    calls = [call for _, calls, *_ in answers for call in calls]
    assert {name for name, _ in calls} == {"find", "greet"}
    assert all(set(arguments) == {"name", "age"} for _, arguments in calls)


def test_one_process_answers_as_mlx_lm(models, questions):
    """The others are compared with this: greedy completions and chats, without grammars and calls."""
    loaded, tokenizer = load(str(models("qwen3")))
    compared = 0
    for api, body, (text, *_) in questions():
        greedy = not {"tools", "temperature", "logit_bias", "repetition_penalty", "response_format"} & set(body)
        if not greedy or "structured_outputs" in body:
            continue
        prompt = body["prompt"] if api == TEXT else tokenizer.apply_chat_template(body["messages"], tokenize=False)
        tokens = tokenizer.encode(prompt, add_special_tokens=api == TEXT)
        made = "".join(each.text for each in stream_generate(loaded, tokenizer, tokens, max_tokens=body["max_tokens"]))
        if api != TEXT and "<tool_call>" in made:  # what follows is no content
            continue
        ends = [made.find(word) for word in body.get("stop", []) if word in made]
        assert text.rstrip("\ufffd") == (made[: min(ends)] if ends else made).rstrip("\ufffd"), body
        compared += 1
    assert compared > 10


def processes(server):
    """Resident bytes, threads and descriptors of each process of a server: launcher, ranks, and what they started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SERVER={server.name}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
                found[int(folder.name)] = (resident, len(os.listdir(folder / "task")), len(os.listdir(folder / "fd")))
    return found


def at_rest(server):
    """MLX's memory, and processes, once nothing runs and the prefix cache has two prompts and nothing else."""
    assert wait_for(lambda: server.metrics()["running"] + server.metrics()["queued"] == 0, 60)
    for prompt in ("a" * 500, "b" * 500):
        server.text(prompt, 1)
    active = []
    for _ in range(15):  # a heartbeat's step frees what the last requests have left
        active.append(server.metrics()['active_memory_bytes{rank="0"}'])
        late(0.1)
    return min(active), processes(server)


def without_rounding(differ, model, folder):
    """Those whose answer one process with quantized caches does not change, however the weights are rounded."""
    for seed in SEEDS if differ else ():
        moved = shutil.copytree(model, folder / str(seed))
        weights = rounded_again(mx.load(str(model / "model.safetensors")), seed)
        mx.save_safetensors(str(moved / "model.safetensors"), weights, {"format": "mlx"})
        with ServerProcess(moved, 1, *OPTIONS, *QUANTIZED) as one, clients_of(one) as to:
            differ = [each for each in differ if to.ask(*each[:2], False) == each[3]]
    return differ


@pytest.mark.parametrize(
    "kind, ranks, options",
    [
        ("qwen3", 2, []),
        ("qwen3", 3, []),
        ("qwen3", 2, ["--split-blocks"]),
        ("qwen3", 3, ["--split-blocks"]),
        ("qwen3", 2, QUANTIZED),
        ("qwen3", 3, QUANTIZED),
        ("qwen3", 2, ["--pipeline"]),
        ("qwen3", 3, ["--pipeline"]),
        ("qwen3", 2, ["--prompt-lookup"]),
        ("qwen3", 3, ["--draft-model", "DRAFT"]),
        ("qwen3", 2, ["--pipeline", "--prompt-lookup"]),
        ("qwen3", 2, ["ADAPTERS"]),
        ("gemma3_text", 2, ["--draft-model", "DRAFT"]),  # sliding windows
        ("qwen3_next", 2, ["--prompt-lookup"]),  # recurrent states
        ("qwen3_next", 2, ["--mtp"]),
    ],
)
def test_every_answer_is_that_of_one_process_and_nothing_grows(tmp_path, models, questions, kind, ranks, options):
    """They overlap, are whole or streamed; of every sixth the client asks for more first, and leaves."""
    model = models(kind)
    asked = questions(kind, *(options if options in (QUANTIZED, ["ADAPTERS"]) else []))
    differ: list[object] = []

    def take(number):
        api, body, expected = asked[number]
        streams = number % 2 == 0
        if number % 6 == 0:
            leaves = body | {"max_tokens": 400} | ({} if api in LACKS else {"logit_bias": {"256": -100}})
            with server.raw(post(BODIES[api](leaves) | {"stream": number % 4 == 0}, api)):
                late(0.02 * (number % 4))
        found = to.ask(api, body, streams)
        if found != expected:
            differ.append((api, body, streams, expected, found))

    with (
        ServerProcess(model, ranks, *OPTIONS, *models.options(kind, *options)) as server,
        clients_of(server) as to,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        order = list(range(len(asked)))
        list(threads.map(take, order))  # which warms it up, too: children start when calls wait, and heaps grow
        active_then, before = at_rest(server)
        after = before
        # Heaps grow now and then, and leaks in each round; and of windows and recurrent states the prefix cache keeps
        # more or fewer, by which requests came first.
        for seed in (1, 2, 3):
            random.Random(seed).shuffle(order)
            list(threads.map(take, order))
            active, (active_then, _) = active_then, at_rest(server)
            start, after = after, processes(server)
            pids = start.keys() & after.keys()
            if active_then - active <= ACTIVE and all(after[pid][0] - start[pid][0] <= RESIDENT for pid in pids):
                break
        counted = lambda each: sorted((threads, descriptors) for _, threads, descriptors in each.values())
        # Threads and descriptors of connections end when the server has seen that their clients have left.
        assert wait_for(lambda: counted(processes(server)) == counted(before), 30), (before, processes(server))
        metrics = server.metrics()
        assert server.stop() == 0, "".join(server.lines)
    if options is QUANTIZED:  # what one process rounds up and another down moves such keys and values by a step
        differ = without_rounding(differ, model, tmp_path)
    assert not differ, f"{len(differ)} answers differ, the first: {differ[0]}"
    assert metrics['requests_total{outcome="error"}'] == metrics['requests_total{outcome="timeout"}'] == 0
    assert metrics['requests_total{outcome="cancelled"}'] > 0 and metrics["prefix_cache_tokens"] <= 1002
    print(f"MLX: {active:.0f} B, then {active_then:.0f} B; (resident B, threads, descriptors): {before}, then {after}")
    assert active_then - active <= ACTIVE
    for pid in pids:
        assert after[pid][0] - start[pid][0] <= RESIDENT, (pid, start[pid], after[pid])
