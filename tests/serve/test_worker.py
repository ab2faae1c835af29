"""The batch of one rank: its tokens are mlx-lm's of each request alone; its prefix cache counts tokens."""

from dataclasses import replace

import mlx.core as mx
import overlapping
import pytest
import tiny_models
from mlx_lm import load, stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.server import _make_logits_processors, _make_sampler
from overlapping import ALL, admission, run
from serving import PLAIN, answer_of, save_model_folder

from mlxdist import Mismatch
from mlxdist.serve.decisions import Decisions
from mlxdist.serve.memory import cache_sizes
from mlxdist.serve.scheduler import Request
from mlxdist.serve.worker import BatchLimits, Worker

END = 256  # the token that ends an answer
SAMPLED = replace(PLAIN.sampling, temperature=0.8, top_p=0.95)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(save_model_folder(tmp_path_factory.mktemp("model"))))


def alone(loaded, request):
    """The tokens that mlx-lm generates for it, by the path that its server takes for requests with a seed."""
    model, tokenizer = loaded
    mx.random.seed(request.seed)
    responses = stream_generate(
        model,
        tokenizer,
        list(request.prompt),
        max_tokens=request.max_tokens,
        sampler=_make_sampler(request, tokenizer),
        logits_processors=_make_logits_processors(request),
    )
    return [response.token for response in responses]


def test_overlapping_requests_get_the_tokens_of_mlx_lm_alone(loaded):
    """Greedy and sampled, with biases and penalties, prompts of one token and of several chunks."""
    requests = [
        admission(0, list(range(40))),
        admission(1, [5], sampling=SAMPLED, seed=3),
        admission(2, [7, 8, 9], sampling=SAMPLED, seed=2**64 - 5),
        admission(3, list(range(60, 93)), sampling=replace(SAMPLED, xtc_probability=0.5, top_k=20), seed=1),
        admission(4, [1, 2, 3], logits=replace(PLAIN.logits, repetition_penalty=1.3, logit_bias={9: 5.0, 17: -7.0})),
    ]
    expected = [alone(loaded, request) for request in requests]
    worker = Worker(*loaded, BatchLimits(prefill_step_size=8))
    assert run(worker, requests[:2], [], requests[2:4], requests[4:]) == dict(enumerate(expected))


def test_a_cached_prefix_gives_the_same_tokens(loaded):
    worker = Worker(*loaded, BatchLimits())
    prompts = [list(range(50)), list(range(50)), [*range(40), 200, 201], list(range(30))]
    expected = [alone(loaded, admission(0, prompt)) for prompt in prompts]
    cached: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        assert run(worker, [admission(number, prompt)], cached=cached) == {number: expected[number]}
    assert list(cached.values()) == [0, 49, 40, 29]


def test_a_prompt_that_is_in_the_cache_as_a_whole(loaded):
    """The text of an earlier answer with its prompt, as clients send it back."""
    worker, first = Worker(*loaded, BatchLimits()), admission(0, list(range(20)))
    answer = run(worker, [first])[0]
    again = admission(1, [*first.prompt, *answer])
    cached: dict[int, int] = {}
    assert run(worker, [again], cached=cached) == {1: alone(loaded, again)}
    assert cached == {1: len(again.prompt) - 1}


def test_a_cancelled_request_leaves_the_others_alone(loaded):
    expected = alone(loaded, admission(0, [1, 2, 3]))
    worker = Worker(*loaded, BatchLimits(prefill_step_size=4))
    found = []
    for step in range(30):
        admit = {0: [admission(0, [1, 2, 3]), admission(1, [4, 5])], 1: [admission(2, list(range(90)))]}.get(step, [])
        end = {4: [(2, ALL)], 6: [(1, ALL), (0xFFFF, ALL)]}.get(step, [])
        outcome = worker.step(Decisions(step, worker.digest, end, admit))
        found += [response.token for response in outcome.tokens if response.uid == 0]
        assert step < 6 or all(response.uid == 0 for response in outcome.tokens)
    assert found == expected


@pytest.mark.parametrize("after", [0, 1, 2, 7, 11])
def test_a_request_that_is_preempted_goes_on_with_the_tokens_it_would_have_had(loaded, after):
    """So do its samples and its penalties."""
    prompt, penalties = list(range(40)), replace(PLAIN.logits, repetition_penalty=1.3, presence_penalty=0.5)
    whole = admission(0, prompt, sampling=replace(SAMPLED, xtc_probability=0.3), seed=5, logits=penalties)
    expected = alone(loaded, whole)
    worker = Worker(*loaded, BatchLimits(prefill_step_size=16))
    request = Request(whole, answer_of(), timeout=60)
    other = admission(1, [9, 8, 7])
    admit, end, tokens, step = [whole], [], {0: request.generated, 1: []}, 0
    while len(tokens[1]) < 20 or len(request.generated) < 20:
        if step == 4 + after:
            request.preempt()
            end, admit = [(0, ALL)], [other]
        elif step == 7 + after:
            tokens[2] = request.generated
            admit = [replace(request.admission, number=2)]
        outcome = worker.step(Decisions(step, worker.digest, end, admit))
        for response in outcome.tokens:
            tokens[response.uid].append(response.token)
        admit, end, step = [], [], step + 1
    assert request.generated == expected and tokens[1] == alone(loaded, other)


def test_what_ends_an_answer(loaded):
    """Tokens of the request's own; the tokenizer's or not; and none before a number of tokens."""
    free = admission(0, list(range(40)), sampling=SAMPLED, seed=11, logits=replace(PLAIN.logits, logit_bias={END: 3.0}))
    free = replace(free, max_tokens=60)
    mx.random.seed(free.seed)
    parts = {"sampler": _make_sampler(free, loaded[1]), "logits_processors": _make_logits_processors(free)}
    tokens = [token for token, _ in generate_step(mx.array(free.prompt), loaded[0], max_tokens=60, **parts)]
    assert END in tokens[:-1]
    first = tokens.index(END)
    other = next(token for token in tokens[: first // 2 + 1] if token != END)
    number = tokens.index(other)

    def answer(**fields):
        return run(Worker(*loaded, BatchLimits()), [replace(free, **fields)])[0]

    assert answer() == tokens[: first + 1]
    whole = answer(ignore_eos=True)
    assert whole == tokens
    assert answer(stop_tokens=[other, 3]) == tokens[: number + 1]
    later = answer(min_tokens=first + 3, stop_tokens=[other])
    assert later[:number] == tokens[:number] and not {END, other} & set(later[: first + 3])
    assert len(later) == 60 or later[-1] in (END, other)
    assert answer(ignore_eos=True, min_tokens=4)[:4] == tokens[:4]


@pytest.mark.parametrize("after", [2, 9])
def test_min_tokens_of_a_request_that_is_preempted(loaded, after):
    """They count the tokens that it has had before."""
    whole = admission(0, list(range(30)), sampling=SAMPLED, seed=4, logits=replace(PLAIN.logits, logit_bias={END: 4.0}))
    whole = replace(whole, max_tokens=30, min_tokens=12)
    expected = run(Worker(*loaded, BatchLimits()), [whole])[0]
    assert 12 < len(expected) < 30 and END not in expected[:12]
    worker, request, step = Worker(*loaded, BatchLimits()), Request(whole, answer_of(), timeout=60), 0
    admit, end = [whole], []
    while len(request.generated) < len(expected):
        if len(request.generated) == after and request.admission is whole:
            request.preempt()
            end, admit = [(0, ALL)], [replace(request.admission, number=1)]
        outcome = worker.step(Decisions(step, worker.digest, end, admit))
        request.generated += [response.token for response in outcome.tokens]
        admit, end, step = [], [], step + 1
    assert request.generated == expected


@pytest.mark.parametrize("when", ["as it runs", "as it ends"])
@pytest.mark.parametrize("kind, cached", [("qwen3", 5 + 7), ("gemma3_text", 4), ("qwen3_next", 4)])
def test_what_comes_after_the_tokens_that_rank_0_keeps_is_not_cached(loaded, kind, cached, when):
    """A sliding window that has moved and a recurrent state do not go back: the prompt alone is kept."""
    model = tiny_models.build(kind)
    worker, request, step = Worker(model, loaded[1], BatchLimits()), admission(0, [5, 6, 7, 8, 9]), 0
    request = replace(request, max_tokens=12 if when == "as it ends" else 50, sampling=overlapping.GREEDY)
    tokens: list[int] = []
    while len(tokens) < 12:
        outcome = worker.step(Decisions(step, worker.digest, admit=[request] if step == 0 else []))
        tokens += [response.token for response in outcome.tokens]
        step += 1
    worker.step(Decisions(step, worker.digest, end=[(0, 5 + 7)]))
    assert worker.cache.tokens == cached
    again = replace(request, number=1, prompt=[*request.prompt, *tokens[:8], 1], segments=[14], max_tokens=6)
    found: dict[int, int] = {}
    steps = generate_step(mx.array(again.prompt), model, max_tokens=6)
    assert run(worker, [again], cached=found) == {1: [token for token, _ in steps]}
    assert found == {1: cached}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_what_the_caches_of_a_request_cost(kind):
    """Against those of 512 tokens: sliding windows and states of linear attention do not grow with them."""
    model = tiny_models.build(kind)
    per_token, fixed = cache_sizes(model, 64)
    caches = make_prompt_cache(model)
    for _ in range(512 // 64):
        mx.eval(model(mx.array([[1] * 64]), cache=caches), [cache.state for cache in caches])
    grown = [cache.nbytes for cache in caches if isinstance(cache, KVCache)]
    assert sum(grown) <= 512 * per_token <= 1.01 * sum(grown)
    assert (fixed > 0) == (len(grown) < len(caches)) and sum(cache.nbytes for cache in caches) - sum(grown) <= fixed


def test_running_requests_take_the_room_of_the_prefix_cache(loaded):
    """On all ranks in the same step: it follows from what is admitted."""
    worker = Worker(*loaded, BatchLimits(max_total_tokens=150))
    for number in range(2):
        run(worker, [admission(number, [number] * 30)])
    assert worker.cache.tokens == 2 * (30 + 20)
    worker.step(Decisions(9, worker.digest, admit=[admission(2, [2] * 60)]))
    assert 0 < worker.cache.tokens <= 150 - (60 + 20)
    left = worker.cache.tokens
    worker.step(Decisions(10, worker.digest, end=[(2, ALL)]))
    assert worker.cache.tokens == left  # it has computed nothing yet
    run(worker, [admission(3, [3] * 30)])
    assert left < worker.cache.tokens <= 150


def test_a_long_prompt_holds_up_the_others_for_a_chunk_at_a_time(loaded):
    """Of 4,000 tokens: a stream gets a token in every step, a short prompt its first one after two chunks."""
    worker, first, chunks = Worker(*loaded, BatchLimits(prefill_step_size=512)), {}, {}
    admitted_at = {0: 0, 1: 4, 2: 6}
    prompts = {0: [1, 2, 3], 1: list(range(250)) * 16, 2: [4, 5, 6]}
    for step in range(14):
        admit = [admission(number, prompts[number]) for number, at in admitted_at.items() if at == step]
        outcome = worker.step(Decisions(step, worker.digest, admit=admit))
        for response in outcome.tokens:
            first.setdefault(response.uid, step)
        chunks[step] = [response.progress[0] for response in outcome.prefill if response.uid == 1]
        assert step < 2 or 0 in [response.uid for response in outcome.tokens]
    assert first == {0: 2, 2: 8}
    assert [chunks[step] for step in (4, 5, 6, 7, 8, 9)] == [[512], [1024], [1536], [2048], [], [2560]]


def test_other_tokens_than_those_of_rank_0_are_a_mismatch(loaded):
    worker = Worker(*loaded, BatchLimits())
    with pytest.raises(Mismatch, match="before step 3 this rank has sampled other tokens than rank 0"):
        worker.step(Decisions(3, worker.digest + 1))
    with pytest.raises(Mismatch, match="rank 0 admits request 9, and the next one here is 0"):
        worker.step(Decisions(3, worker.digest, admit=[admission(9, [1])]))


@pytest.mark.parametrize(
    "kind",
    ["qwen3", "afm7", "gemma2", "llama4", "deepseek_v41", "gpt_bigcode", "phi3small"]
    + [pytest.param(kind, marks=pytest.mark.long) for kind in ("jamba", "prism_hadamard_qwen35")],
)
def test_models_that_mlx_lm_batches_and_others(loaded, kind):
    """Batches of several prompts, of one, and of one request; models that fail in all batches of mlx-lm.
    tests/serve/test_served_models.py has the other kinds."""
    model, limits = tiny_models.build(kind), BatchLimits(prefill_step_size=4)
    worker = Worker(model, loaded[1], limits)
    assert worker.warm_up() == tiny_models.config_of(kind).get("vocab_size", 96)
    expected = overlapping.alone(model)
    found, cached = overlapping.overlapping(worker, expected[0])
    assert found == expected and cached > 0
