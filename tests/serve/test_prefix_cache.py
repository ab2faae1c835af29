"""What the batch of one rank computes of conversations, and what it takes from the prefix cache."""

import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from overlapping import ALL, GREEDY, admission, run
from serving import save_model_folder

from mlxdist.serve import cache_blocks, prefix_tree
from mlxdist.serve.decisions import Admission, Decisions
from mlxdist.serve.worker import BatchLimits, Worker

ANSWER = 8  # tokens
PLAIN, WITH_STATES = ["qwen3"], ["qwen3_next", "gemma3_text"]
OTHERS = ["lfm2", "nemotron_h", "mamba2", "kimi_linear", "mimo_v2_flash", "granitemoehybrid", "jamba", "rwkv7"]
KINDS = [*PLAIN, *WITH_STATES, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(str(save_model_folder(tmp_path_factory.mktemp("model"))))[1]


def model_of(kind: str, **fields: object) -> Any:
    model = tiny_models.build(kind, max_position_embeddings=65_536, **fields)
    mx.eval(model.parameters())
    return model


def words(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(96) for _ in range(count)]


def alone(model: Any, prompt: list[int]) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=ANSWER)]


class Client:
    """Sends requests to a worker, one at a time or several that come a step after each other."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.number = worker, 0
        self.cached: dict[int, int] = {}

    def request(self, prompt: list[int], *ends: int, **fields: Any) -> Admission:
        """``ends``: where segments of the prompt end, but for the last."""
        borders = [0, *ends, len(prompt)]
        segments = [stop - start for start, stop in zip(borders, borders[1:])]
        made = replace(admission(self.number, prompt, sampling=GREEDY), segments=segments, max_tokens=ANSWER)
        self.number += 1
        return replace(made, **fields)

    def ask(self, *requests: Admission) -> list[tuple[list[int], int]]:
        """The answer to each request, and how many tokens of its prompt were in the cache."""
        answers = run(self.worker, *([request] for request in requests), cached=self.cached)
        return [(answers[request.number], self.cached[request.number]) for request in requests]

    def say(self, prompt: list[int], *ends: int) -> tuple[list[int], int]:
        return self.ask(self.request(prompt, *ends))[0]


def require_ten_turns(model: Any, tokenizer: Any, tokens: int) -> list[list[int]]:
    """Conversations of four users with one system prompt, who write at the same time, that grow to ``tokens`` tokens:
    in each turn the new tokens are computed. Returns the last prompts with their answers."""
    generator = random.Random(tokens)
    client, system = Client(Worker(model, tokenizer, BatchLimits())), words(generator, tokens // 10)
    turn = tokens * 9 // 100 - ANSWER
    before = [list(system) for _ in range(4)]
    for number in range(10):
        prompts = [each + words(generator, turn + user) for user, each in enumerate(before)]
        answers = client.ask(*(client.request(prompt, len(system)) for prompt in prompts))
        for user, (answer, cached) in enumerate(answers):
            assert len(answer) == ANSWER
            if number:
                assert len(prompts[user]) - cached == turn + user, (number, user, cached)
            before[user] = prompts[user] + answer
    assert tokens * 0.98 <= len(before[0]) <= tokens
    assert client.worker.cache.tokens <= 4 * tokens - 3 * len(system) + 100  # the system prompt once
    return before


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [PLAIN[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in (*PLAIN[1:], *WITH_STATES, *OTHERS))]
)
def test_ten_turns_of_four_users(tokenizer, kind):
    model = model_of(kind)
    for tokens in require_ten_turns(model, tokenizer, 3000):
        assert tokens[-ANSWER:] == alone(model, tokens[:-ANSWER])


@pytest.mark.long
@pytest.mark.parametrize("kind, layers", [("qwen3", 1), ("qwen3_next", 2), ("gemma3_text", 2)])
def test_ten_turns_of_four_users_that_grow_to_40_000_tokens(tokenizer, kind, layers):
    model = model_of(kind, num_hidden_layers=layers)
    tokens = require_ten_turns(model, tokenizer, 40_000)[-1]
    assert tokens[-ANSWER:] == alone(model, tokens[:-ANSWER])


@pytest.mark.parametrize("interval", [64, pytest.param(4096, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_differs_in_an_earlier_turn(tokenizer, kind, interval):
    """The tokens before the difference come from the cache; with states, those before the last states there."""
    generator, model = random.Random(1), model_of(kind)
    client = Client(Worker(model, tokenizer, BatchLimits(snapshot_interval=interval, prefill_step_size=128)))
    system, first, second, third = (words(generator, count) for count in (50, 150, 200, 70))
    one = client.say(system + first, 50)[0]
    two = client.say(system + first + one + second, 50)[0]
    client.say(system + first + one + second + two + third, 50)
    whole = system + first + one + second + two + third
    # Ends of the system prompt, of prompts but for their last tokens, and of answers.
    states = {50, 199, 208, 407, 416, 485, *range(0, 486, interval)}
    for place in (20, 50, 51, 120, 203, 210, 300, 410, 450):
        prompt = whole[:place]
        prompt += [95 - token for token in (third + first)][: 500 - place]
        common = next(i for i, (x, y) in enumerate(zip(prompt, whole)) if x != y)
        answer, cached = client.say(prompt)
        expected = common if kind in PLAIN else max(each for each in states if each <= common)
        assert (cached, answer) == (expected, alone(model, prompt)), place


@pytest.mark.parametrize("kind", WITH_STATES)
def test_an_edit_computes_few_tokens_before_it(tokenizer, kind):
    """At most as many as its prompt had after it, or 512, or the interval; and there are few states for that."""
    generator, model = random.Random(6), model_of(kind, num_hidden_layers=2)
    client = Client(Worker(model, tokenizer, BatchLimits(snapshot_interval=4096)))
    first = words(generator, 9000)
    second = first + client.say(first)[0] + words(generator, 3000)
    client.say(second)
    assert client.worker.cache.states == 2 + 3 + 2 + 3 + 2  # multiples of 4096, twice before an end, and at ends
    for prompt in (first, second):
        for after in (1, 300, 511, 513, 900, 1500, 2047, 2900):
            place = len(prompt) - after
            cached = client.worker.cache.fetch(0, [*second[:place], 95 - second[place]], make_prompt_cache(model))
            assert 0 <= place - cached <= max(512, after), (place, cached)
    assert client.worker.cache.fetch(0, [*second[:4000], 95 - second[4000]], make_prompt_cache(model)) == 0
    assert client.worker.cache.fetch(0, [*second[:6000], 95 - second[6000]], make_prompt_cache(model)) == 4096


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_drops_earlier_thoughts(tokenizer, kind):
    """All is computed from the first thought on, and nothing before it."""
    generator, model = random.Random(2), model_of(kind)
    client, think, end = Client(Worker(model, tokenizer, BatchLimits())), [1, 2], [3]
    chat, before = words(generator, 300), 0
    for turn in range(4):
        prompt = chat + think
        answer, cached = client.say(prompt, len(chat))
        assert answer == alone(model, prompt)
        assert cached == before
        before = len(chat)  # what comes next differs from ``think``
        chat = [*chat, 90, *answer[ANSWER // 2 :], *end, *words(generator, 100)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_comes_while_another_with_its_system_prompt_is_computed(tokenizer, kind):
    """It has the system prompt from the cache as soon as that has been computed, before the other's first token."""
    generator, model = random.Random(3), model_of(kind)
    client = Client(Worker(model, tokenizer, BatchLimits(prefill_step_size=32)))
    system = words(generator, 100)
    prompts = [system + words(generator, 300), system + words(generator, 20), system + words(generator, 9)]
    requests = [client.request(prompt, len(system)) for prompt in prompts]
    answers = run(client.worker, [requests[0]], [requests[1]], *[[]] * 5, [requests[2]], cached=client.cached)
    assert [answers[number] for number in range(3)] == [alone(model, prompt) for prompt in prompts]
    assert client.cached == {0: 0, 1: 0, 2: 100}


@pytest.mark.parametrize("kind", WITH_STATES)
@pytest.mark.parametrize("later", [5, 6, 7])
def test_a_prompt_that_begins_with_a_segment_of_one_token(tokenizer, kind, later):
    """It comes while another one has its last chunks, so that a sliding window is full, and rotates, for one token."""
    generator, model = random.Random(8), model_of(kind)
    client = Client(Worker(model, tokenizer, BatchLimits(prefill_step_size=16)))
    prompts = [words(generator, 95), words(generator, 25)]
    requests = [client.request(prompts[0]), client.request(prompts[1], 1)]
    answers = run(client.worker, [requests[0]], *[[]] * (later - 1), [requests[1]], cached=client.cached)
    assert [answers[number] for number in range(2)] == [alone(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("when", ["while it runs", "after its end"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_turn_after_a_stop_word(tokenizer, kind, when):
    """Of the answer's tokens that rank 0 gives up, none is there; with states, none of the answer's."""
    generator, model = random.Random(4), model_of(kind)
    client, prompt = Client(Worker(model, tokenizer, BatchLimits(snapshot_interval=100))), words(generator, 350)
    request = client.request(prompt, max_tokens=ANSWER if when == "after its end" else 50)
    answer: list[int] = []
    for step in range(100):
        outcome = client.worker.step(Decisions(step, client.worker.digest, admit=[] if step else [request]))
        answer += [response.token for response in outcome.tokens]
        if len(answer) == ANSWER:
            break
    client.worker.step(Decisions(100, client.worker.digest, end=[(0, 350 + 5)]))
    again = prompt + answer[:5] + words(generator, 30)
    expected = 350 + 5 if kind in PLAIN else 349
    assert client.say(again) == (alone(model, again), expected)
    assert client.worker.cache.fetch(0, prompt + answer[:6], make_prompt_cache(model)) == expected


@pytest.mark.parametrize("kind", PLAIN + WITH_STATES)
def test_a_step_that_only_generates_calls_nothing_of_the_prefix_tree(tokenizer, kind):
    """Neither does a chunk of a prompt at which no segment ends."""
    client, counts = Client(Worker(model_of(kind), tokenizer, BatchLimits(prefill_step_size=16))), Counter()
    files = {prefix_tree.__file__, cache_blocks.__file__}

    def count(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            counts[step] += 1

    requests = [client.request(words(random.Random(5), 100), max_tokens=30)]
    ended = {}
    sys.setprofile(count)
    try:
        for step in range(60):
            end = [(0, ALL)] if step == 50 else []
            outcome = client.worker.step(Decisions(step, client.worker.digest, end, [] if step else requests))
            ended[step] = [each.uid for each in outcome.prefill if each.end_of_segment]
    finally:
        sys.setprofile(None)
    ends = {step for step, uids in ended.items() if uids}
    assert ends and set(counts) <= {0, 50} | ends and {0, 50} <= set(counts)
