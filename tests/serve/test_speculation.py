"""Drafts of `mlxdist serve`: the same tokens as without them, in fewer steps."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest
import tiny_models
from mlx_lm import load
from overlapping import ALL
from serving import PLAIN, ServerProcess, random_request, require_answers, save_adapters, save_model_folder
from test_worker import SAMPLED, admission, alone, run
from waiting import wait_for

from mlxdist import InvalidArgument, Mismatch
from mlxdist.serve.decisions import Decisions
from mlxdist.serve.draft_model import DraftedModel
from mlxdist.serve.worker import BatchLimits, Worker


def save_draft_folder(model, folder, noise=0.05):
    """A folder of the same model, whose weights are a little off: some of its drafts are right."""
    shutil.copytree(model, folder)
    weights = mx.load(str(model / "model.safetensors"))
    mx.random.seed(5)
    for name, array in weights.items():
        weights[name] = array + noise * mx.random.normal(array.shape).astype(array.dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    model = save_model_folder(tmp_path_factory.mktemp("model") / "tiny")
    return model, save_draft_folder(model, model.parent / "draft")


@pytest.fixture(scope="module")
def loaded(folders):
    return load(str(folders[0]))


@pytest.fixture(scope="module")
def draft_model(folders):
    return load(str(folders[1]))[0]


def worker_with(loaded, draft_model, num_draft_tokens):
    model, tokenizer = loaded
    model = model if draft_model is None else DraftedModel(model, draft_model)
    worker = Worker(model, tokenizer, BatchLimits(prefill_step_size=16, num_draft_tokens=num_draft_tokens))
    worker.warm_up()
    return worker


def counted(worker):
    """[drafted, accepted, steps] of a worker from now on."""
    counts, step = [0, 0, 0], worker.step

    def counting(decisions):
        outcome = step(decisions)
        for place, more in enumerate((outcome.drafted, outcome.accepted, bool(outcome.tokens))):
            counts[place] += more
        return outcome

    worker.step = counting
    return counts


def random_admission(generator, number):
    prompt = [generator.randrange(250) for _ in range(generator.choice([1, 2, 5, 30, 60]))]
    if generator.random() < 0.5:
        prompt = (prompt * 5)[:80]
    request = replace(admission(number, prompt), max_tokens=generator.choice([1, 2, 20, 50]))
    if generator.random() < 0.5:
        xtc = generator.choice([0.0, 0.5])
        sampling = replace(SAMPLED, temperature=generator.choice([0.3, 1.0]), xtc_probability=xtc)
        request = replace(request, sampling=sampling, seed=generator.getrandbits(64))
    if number % 3 == 0:  # so few tokens that some are looked up rightly
        bias = dict.fromkeys(range(3), 40.0)
        logits = replace(PLAIN.logits, repetition_penalty=1.1, logit_bias=bias)
        request = replace(request, logits=logits, max_tokens=40)
    return request


@pytest.mark.parametrize("drafts", ["looked up", "of a model"])
@pytest.mark.parametrize("num_draft_tokens", [3, *(pytest.param(most, marks=pytest.mark.long) for most in (1, 8))])
def test_overlapping_requests_get_the_tokens_of_mlx_lm_alone(loaded, draft_model, drafts, num_draft_tokens):
    generator = random.Random(num_draft_tokens)
    requests = [random_admission(generator, number) for number in range(12)]
    worker = worker_with(loaded, draft_model if drafts == "of a model" else None, num_draft_tokens)
    counts = counted(worker)
    found = run(worker, *(requests[start : start + 2] for start in range(0, 12, 2)))
    assert found == {request.number: alone(loaded, request) for request in requests}
    assert 0 < counts[1] < counts[0]


def test_drafts_of_the_model_itself_are_all_right(loaded):
    """Greedy and sampled: a draft is drawn with the random state of its place in the answer."""
    requests = [admission(0, [1, 2, 3]), admission(1, [4, 5], sampling=SAMPLED, seed=9)]
    requests = [replace(request, max_tokens=41) for request in requests]
    worker = worker_with(loaded, loaded[0], 4)
    counts = counted(worker)
    found = run(worker, requests)
    assert found == {number: alone(loaded, requests[number]) for number in (0, 1)}
    assert counts[2] == 9  # 5 tokens in each
    assert worker._generator._generation_batch._current_tokens is None  # mlx-lm would join those of all requests


def test_what_repeats_is_looked_up(loaded):
    """A model that says the same three tokens again and again, since all others are forbidden after each."""
    cycle = {10: 20, 20: 30, 30: 10}

    def follow(tokens, logits):
        allowed = mx.arange(logits.shape[-1]) == cycle[tokens[-1].item()]
        return mx.where(allowed, logits, -mx.inf)

    worker = worker_with(loaded, None, 3)
    worker._generator.insert([[30, 10]], max_tokens=[33], logits_processors=[[follow]])
    found, steps = [], 0
    while responses := worker._generator.next_generated():
        found += [response.token for response in responses]
        steps += 1
    assert found == [20, 30, 10] * 11
    assert steps == 2 + 8  # until the last two have been there before; then 4 in each


def test_a_cached_prefix_is_of_both_models(loaded, draft_model):
    """The second prompt begins as the first; drafts are as good as without the cache."""
    worker = worker_with(loaded, loaded[0], 3)
    first, second = admission(0, list(range(50))), admission(1, [*range(40), 200, 201])
    cached: dict[int, int] = {}
    assert run(worker, [first], cached=cached)[0] == alone(loaded, first)
    counts = counted(worker)
    assert run(worker, [second], cached=cached)[1] == alone(loaded, second)
    assert cached == {0: 0, 1: 40} and counts[2] == 5  # of 20 tokens


def test_cancelled_requests_leave_the_others_alone(loaded, draft_model):
    requests = [admission(number, [1 + number, 2, 3]) for number in range(3)]
    worker, found = worker_with(loaded, draft_model, 3), []
    for step in range(30):
        admit = requests if step == 0 else []
        outcome = worker.step(Decisions(step, worker.digest, {4: [(0, ALL)], 6: [(2, ALL)]}.get(step, []), admit))
        found += [response.token for response in outcome.tokens if response.uid == 1]
    assert found == alone(loaded, requests[1])


def test_other_drafts_than_those_of_rank_0_are_a_mismatch(loaded, draft_model):
    """Though both ranks sample the same tokens."""
    workers = [worker_with(loaded, draft_model, 3), worker_with(loaded, loaded[0], 3)]
    digests = []
    for worker in workers:
        worker.step(Decisions(0, worker.digest, admit=[admission(0, [1, 2, 3])]))
        digests.append([worker.step(Decisions(step, worker.digest)) and worker.digest for step in range(1, 6)])
    assert digests[0] != digests[1]
    with pytest.raises(Mismatch, match="this rank has sampled other tokens than rank 0"):
        workers[0].step(Decisions(6, workers[1].digest))


@pytest.mark.parametrize("drafts", ["looked up", "of a model"])
@pytest.mark.parametrize(
    "kind, most",
    [("gemma3_text", 3), pytest.param("qwen3_next", 3, marks=pytest.mark.long)]
    + [
        pytest.param(kind, most, marks=pytest.mark.long)
        for kind in ("gemma3_text", "qwen3_next", "qwen3_5", "gpt_oss", "granitemoehybrid", "lfm2", "falcon_h1")
        for most in (1, 6)
    ],
)
def test_sliding_windows_and_recurrent_states_go_back(tmp_path, kind, most, drafts):
    """Overlapping requests longer than a window, greedy and sampled, of which each accepts other numbers of drafts."""
    folder = save_model_folder(tmp_path / kind, kind)
    loaded = load(str(folder))
    draft_model = load(str(save_draft_folder(folder, tmp_path / "draft")))[0] if drafts == "of a model" else None
    generator = random.Random(most)
    requests = [random_admission(generator, number) for number in range(10)]
    worker = worker_with(loaded, draft_model, most)
    counts = counted(worker)
    found = run(worker, *(requests[start : start + 2] for start in range(0, 10, 2)))
    assert found == {request.number: alone(loaded, request) for request in requests}
    assert 0 < counts[1] < counts[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, ranks, options",
    [("qwen3_next", 2, ["--draft-model", "DRAFT", "--shard-draft-model"])]
    + [
        pytest.param(kind, ranks, options, marks=pytest.mark.long)
        for kind in ("qwen3", "gemma3_text", "qwen3_next")
        for ranks, options in (
            (2, ["--prompt-lookup", "--shard-vocabulary"]),
            (2, ["--prompt-lookup", "--pipeline"]),
            (3, ["--draft-model", "DRAFT", "--rank-shares", "2,1,1"]),
            (4, ["--draft-model", "DRAFT", "--shard-draft-model", "--tp", "2", "--pipeline"]),
        )
    ],
)
def test_they_go_back_on_all_ranks(tmp_path, kind, ranks, options):
    folder = save_model_folder(tmp_path / kind, kind)
    draft = save_draft_folder(folder, tmp_path / "draft")
    require_answers(folder, ranks, *(str(draft) if option == "DRAFT" else option for option in options))


def test_models_whose_prompts_are_computed_alone_have_no_drafts(loaded):
    """A draft that one row of a batch rejects is computed as padding of the others is."""
    with pytest.raises(InvalidArgument, match="drafts are not for jamba, whose prompts mlx-lm computes one at a time"):
        Worker(tiny_models.build("jamba"), loaded[1], BatchLimits(num_draft_tokens=2))


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, options",
    [
        (2, ["--draft-model", "DRAFT"]),
        pytest.param(1, ["--draft-model", "DRAFT"], marks=pytest.mark.long),
        pytest.param(3, ["--draft-model", "DRAFT"], marks=pytest.mark.long),
        pytest.param(2, ["--draft-model", "DRAFT", "--shard-draft-model"], marks=pytest.mark.long),
        pytest.param(3, ["--draft-model", "DRAFT", "--shard-draft-model"], marks=pytest.mark.long),
        pytest.param(2, ["--prompt-lookup", "--num-draft-tokens", "5"], marks=pytest.mark.long),
        pytest.param(2, ["--draft-model", "DRAFT", "--shard-vocabulary"], marks=pytest.mark.long),
        pytest.param(3, ["--prompt-lookup", "--shard-vocabulary"], marks=pytest.mark.long),
        pytest.param(
            2, ["--draft-model", "DRAFT", "--shard-draft-model", "--shard-vocabulary"], marks=pytest.mark.long
        ),
    ],
)
def test_a_server_with_drafts_answers_as_without(folders, ranks, options):
    generator = random.Random(ranks)
    bodies = [random_request(generator) for _ in range(12)]
    bodies.append({"prompt": "again", "max_tokens": 40, "logit_bias": {"0": 100, "1": 99.5}})  # what can be looked up
    options = [str(folders[1]) if option == "DRAFT" else option for option in options]
    with ServerProcess(folders[0], 1) as server:
        expected = [server.ask(body)["choices"] for body in bodies]
    with ServerProcess(folders[0], ranks, *options) as server, ThreadPoolExecutor(6) as threads:
        assert [answer["choices"] for answer in threads.map(server.ask, bodies)] == expected
        metrics = server.metrics()
        assert 0 < metrics["accepted_draft_tokens_total"] < metrics["draft_tokens_total"]
        assert server.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("options", [["--draft-model", "DRAFT"], ["--prompt-lookup"], ["--shard-vocabulary"]])
def test_adapters_grammars_and_preemption_are_as_without(folders, tmp_path, options):
    """Whatever else computes the tokens of the batch."""
    adapters = [save_adapters(tmp_path / f"adapter {seed}", folders[0], seed) for seed in (1, 2)]
    given = [word for seed, folder in enumerate(adapters) for word in ("--adapter", f"lora{seed}={folder}")]
    given += ["--max-context", "800", "--decode-concurrency", "3"]
    generator = random.Random(7)
    endless = {"max_tokens": 700, "logit_bias": {"256": -100}, "priority": 5}
    bodies = [{"prompt": f"leaves the batch {number}"} | endless for number in range(3)]
    for number in range(24):
        body = random_request(generator) | {"priority": number % 3 - 1}
        if number % 3:
            body["model"] = f"lora{number % 3 - 1}"
        if number % 4 == 0:
            body = {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2,9}!"}} | body
            body.pop("stop", None)
        bodies.append(body)
    options = [str(folders[1]) if option == "DRAFT" else option for option in options]
    with ServerProcess(folders[0], 1, *given) as server:
        expected = [server.ask(body)["choices"] for body in bodies]
    with ServerProcess(folders[0], 2, *given, *options) as server, ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(server.ask, body) for body in bodies[:3]]
        assert wait_for(lambda: server.metrics()["running"] == 3, 30)
        answers += [threads.submit(server.ask, body) for body in bodies[3:]]
        assert [answer.result()["choices"] for answer in answers] == expected
        assert server.metrics()["preempted_total"] > 0
        assert server.stop() == 0


@pytest.mark.parametrize(
    "options, wrong",
    [
        (["--draft-model", "SMALL"], "the draft model has logits for 300 tokens, and the model for 259"),
        (["--draft-model", "OTHER"], "has another tokenizer"),
        (["--shard-vocabulary", "--pipeline"], "--shard-vocabulary is for ranks that share every layer"),
    ],
)
@pytest.mark.long
def test_drafts_that_cannot_be_served(folders, tmp_path, options, wrong):
    drafts = {"SMALL": save_model_folder(tmp_path / "small", vocab_size=300), "OTHER": tmp_path / "other"}
    shutil.copytree(folders[0], drafts["OTHER"])
    tokenizer = drafts["OTHER"] / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|tool|>", "<|mark|>"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := drafts["OTHER"] / name).exists():
            path.write_text(path.read_text().replace("<|tool|>", "<|mark|>"))
    with pytest.raises(AssertionError, match=wrong):  # it ends with its output
        ServerProcess(folders[0], 2, *(str(drafts.get(option, option)) for option in options))
