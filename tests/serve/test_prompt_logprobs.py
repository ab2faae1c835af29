"""Log-probabilities of prompts, as `echo` with `logprobs` asks for: those of one call of the model with the prompt."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest
import tiny_models
from mlx_lm import load
from overlapping import ALL, GREEDY, admission
from serving import ServerProcess, answer_of, save_adapters, save_model_folder

from mlxdist.nn import load_sharded
from mlxdist.serve import prompt_logprobs
from mlxdist.serve.adapters import AdaptedModel
from mlxdist.serve.decisions import Decisions
from mlxdist.serve.draft_model import DraftedModel
from mlxdist.serve.scheduler import Request
from mlxdist.serve.worker import BatchLimits, Worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder))


def expected_of(model, prompt):
    """(log-probability of the token, all log-probabilities) at each place of a prompt but the first, by one call."""
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    rows = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1].tolist()
    return [(row[token], row) for token, row in zip(prompt[1:], rows)]


def require(found, prompt, likely, model):
    """``found``: the tokens of a prompt that a worker has returned."""
    assert [token.token for token in found] == prompt
    assert found[0].logprob is None and found[0].top == ()
    for token, (logprob, row) in zip(found[1:], expected_of(model, prompt), strict=True):
        assert token.logprob == pytest.approx(logprob, abs=1e-4) and len(token.top) == likely
        values = [value for _, value in token.top]
        assert values == pytest.approx(sorted(row, reverse=True)[:likely], abs=1e-4)
        assert values == pytest.approx([row[each] for each, _ in token.top], abs=1e-4)


def scored(worker, rounds, steps=400):
    """The tokens of prompts and of answers, by request, where each of ``rounds`` is admitted one step later."""
    prompts, answers, end, step, left = {}, {}, [], 0, sum(map(len, rounds))
    while left or end:
        outcome = worker.step(Decisions(step, worker.digest, end, rounds[step] if step < len(rounds) else []))
        for number, tokens in outcome.prompt_logprobs.items():
            assert number not in answers  # before the answer
            prompts.setdefault(number, []).extend(tokens)
        for response in outcome.tokens:
            answers.setdefault(response.uid, []).append(response.token)
        end = [(response.uid, ALL) for response in outcome.tokens if response.finish_reason is not None]
        left, step = left - len(end), step + 1
        assert step < steps
    return prompts, answers


def random_requests(generator, count, **fields):
    """Prompts of one token, of several chunks, and equal ones, some without log-probabilities of the prompt."""
    requests = []
    for number in range(count):
        prompt = [generator.randrange(250) for _ in range(generator.choice([1, 2, 3, 16, 17, 33, 70]))]
        if requests and generator.random() < 0.3:
            prompt = [*generator.choice(requests).prompt, 7]
        request = replace(admission(number, prompt, sampling=GREEDY), max_tokens=generator.choice([1, 5]), **fields)
        requests.append(replace(request, prompt_logprobs=generator.choice([None, 0, 1, 5, 20])))
    return requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("call, block", [(1024, 128), (8, 3)])
def test_those_of_requests_that_overlap_with_others(loaded, monkeypatch, seed, call, block):
    """Also where few logits are in memory at a time; the answers are those without."""
    monkeypatch.setattr(prompt_logprobs, "_CALL", call)
    monkeypatch.setattr(prompt_logprobs, "_BLOCK", block)
    requests = random_requests(random.Random(seed), 10)
    rounds = [requests[:4], requests[4:5], [], requests[5:]]
    prompts, answers = scored(Worker(*loaded, BatchLimits(prefill_step_size=16)), rounds)
    assert set(prompts) == {request.number for request in requests if request.prompt_logprobs is not None}
    for number, found in prompts.items():
        require(found, requests[number].prompt, requests[number].prompt_logprobs, loaded[0])
    plain = [[replace(request, prompt_logprobs=None) for request in each] for each in rounds]
    assert scored(Worker(*loaded, BatchLimits(prefill_step_size=16)), plain) == ({}, answers)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_those_of_models_with_other_caches(loaded, kind):
    """Sliding windows, which are shorter than the prompts, and recurrent states."""
    model = tiny_models.build(kind)
    lengths = [40, 1, 23, 40]
    requests = [replace(admission(number, [3 + at % 80 for at in range(length)], sampling=GREEDY), max_tokens=2)
                for number, length in enumerate(lengths)]  # fmt: skip
    requests = [replace(request, prompt_logprobs=3) for request in requests]
    prompts, _ = scored(Worker(model, loaded[1], BatchLimits(prefill_step_size=8)), [requests])
    for number, request in enumerate(requests):
        require(prompts[number], request.prompt, 3, model)


@pytest.mark.parametrize("has_draft", [True, False])
def test_those_of_a_server_with_drafts(loaded, has_draft):
    model, tokenizer = loaded
    drafted = DraftedModel(model, tiny_models.build("qwen3", seed=9, vocab_size=259)) if has_draft else model
    worker = Worker(drafted, tokenizer, BatchLimits(prefill_step_size=16, num_draft_tokens=3))
    assert worker.warm_up() == 259
    requests = random_requests(random.Random(5), 6)
    prompts, answers = scored(worker, [requests[:3], requests[3:]])
    for number, found in prompts.items():
        require(found, requests[number].prompt, requests[number].prompt_logprobs, model)
    plain = scored(Worker(model, tokenizer, BatchLimits()), [requests[:3], requests[3:]])
    assert answers == plain[1] and len(prompts) > 2


def test_those_of_each_rows_adapter(folder, tmp_path):
    adapters = [save_adapters(tmp_path / name, folder, seed) for seed, name in ((3, "one"), (4, "two"))]
    model, tokenizer = load_sharded(folder, adapter_path=[str(path) for path in adapters])
    alone = [load(str(folder))[0], *(load(str(folder), adapter_path=str(path))[0] for path in adapters)]
    worker = Worker(AdaptedModel(model), tokenizer, BatchLimits(prefill_step_size=16))
    prompt = list(range(40))
    requests = [replace(admission(number, prompt, sampling=GREEDY), adapter=number % 3, max_tokens=2, prompt_logprobs=2)
                for number in range(4)]  # fmt: skip
    prompts, _ = scored(worker, [requests])
    for number, found in prompts.items():
        require(found, prompt, 2, alone[number % 3])
    assert worker.cache.fetch(1, [*prompt, 1], worker._prompt_cache(1)) == len(prompt)  # which others may continue
    later = replace(admission(4, prompt, sampling=GREEDY), adapter=1, prompt_logprobs=2)
    require(scored(worker, [[later]])[0][4], prompt, 2, alone[1])


@pytest.mark.parametrize("after", [1, 2, 4, 6])
def test_a_request_that_is_preempted_gets_each_once(loaded, after):
    """Also one whose prompt is half computed then."""
    prompt = list(range(60))
    request = Request(replace(admission(0, prompt), prompt_logprobs=2, max_tokens=6), answer_of(), timeout=60)
    worker, number, admit, end, step = Worker(*loaded, BatchLimits(prefill_step_size=16)), 0, [request.admission], [], 0
    while len(request.generated) < 6:
        if step == after:
            request.preempt()
            number, end = 1, [(0, ALL)]
            admit = [replace(request.admission, number=1)]
        outcome = worker.step(Decisions(step, worker.digest, end, admit))
        if number in outcome.prompt_logprobs:
            request.add_scored(outcome.prompt_logprobs[number])
        request.generated += [response.token for response in outcome.tokens]
        admit, end, step = [], [], step + 1
    require(list(request.events.get_nowait().tokens), prompt, 2, loaded[0])
    assert request.events.empty()


def loglikelihood(server, model, tokenizer, context, continuation, **fields):
    """As lm-eval asks for it, with the whole prompt as tokens. Compares with one call of the model."""
    prompt, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    body = {"prompt": [prompt], "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234} | fields
    answer = server.ask(body)
    (choice,), most = answer["choices"], fields["max_tokens"]
    made, logprobs = answer["usage"]["completion_tokens"], choice["logprobs"]
    assert made == most and choice["finish_reason"] == "length"
    assert choice["text"].startswith(context + continuation)
    assert all(len(logprobs[name]) == len(prompt) + made for name in logprobs)
    assert logprobs["token_ids"][: len(prompt)] == prompt and logprobs["text_offset"] == list(range(len(prompt) + made))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = expected_of(model, prompt)
    found = logprobs["token_logprobs"][1 : len(prompt)]
    assert found == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    tops = [max(tops.values()) for tops in logprobs["top_logprobs"][1 : len(prompt)]]
    assert tops == pytest.approx([max(row) for _, row in expected], abs=1e-4)
    return sum(found[start - 1 :])


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, options",
    [
        (2, ["--shard-vocabulary"]),
        (2, ["--pipeline"]),
        pytest.param(1, [], marks=pytest.mark.long),
        pytest.param(3, [], marks=pytest.mark.long),
        pytest.param(3, ["--pipeline"], marks=pytest.mark.long),
        pytest.param(3, ["--shard-vocabulary"], marks=pytest.mark.long),
        pytest.param(2, ["--split-blocks"], marks=pytest.mark.long),
        pytest.param(2, ["--draft-model"], marks=pytest.mark.long),
    ],
)
def test_what_an_evaluation_asks_several_ranks_for(folder, loaded, ranks, options):
    """Among requests that generate; with a stream, whose parts have the same."""
    options = [*options, folder] if options == ["--draft-model"] else options
    model, tokenizer = loaded
    questions = [(f"question {number}: " + "why? " * (number * 3 % 11), "because it is") for number in range(8)]
    other = {"prompt": "another", "max_tokens": 60, "logit_bias": {"256": -100}}
    with ServerProcess(folder, ranks, "--prefill-step-size", 16, *options) as server, ThreadPoolExecutor(6) as threads:
        text = server.text(**other)
        busy = [threads.submit(server.text, **other) for _ in range(2)]
        asked = [
            threads.submit(loglikelihood, server, model, tokenizer, *question, max_tokens=number % 2)
            for number, question in enumerate(questions)
        ]
        assert all(each.result() < 0 for each in asked)
        assert [each.result() for each in busy] == [text] * 2
        body = {"prompt": "in parts", "echo": True, "logprobs": 3, "max_tokens": 4, "temperature": 0}
        whole = server.ask(body)["choices"][0]
        parts = [json.loads(part)["choices"][0] for part in server.stream(body)[:-1]]
        assert "".join(part["text"] for part in parts) == whole["text"]
        for name in ("tokens", "text_offset"):
            assert sum((part["logprobs"][name] for part in parts if part["logprobs"]), []) == whole["logprobs"][name]
        assert server.stop() == 0, "".join(server.lines)
