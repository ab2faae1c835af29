"""Drafts of heads for multi-token prediction: the same tokens as without them, in fewer steps."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mtp_models import KINDS, agreeing_folder, plain_logits, save_mtp_folder, with_original_weights
from overlapping import GREEDY, admission, run
from serving import ServerProcess, random_request, require_answers, save_model_folder
from test_speculation import counted, random_admission
from test_worker import SAMPLED, alone
from waiting import wait_for

import mlxdist
from mlxdist import InvalidArgument
from mlxdist.nn.models.load import load_sharded
from mlxdist.nn.models.mtp_head import load_mtp_head
from mlxdist.nn.models.plan import plan_shards
from mlxdist.serve.decisions import Decisions
from mlxdist.serve.mtp import Backbone, MtpModel
from mlxdist.serve.worker import BatchLimits, Worker

TWO = ("deepseek_v3", "qwen3_next")
OTHERS = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in TWO]
OTHER_COUNTS = [("deepseek_v3", 3), ("qwen3_next", 1), ("qwen3_next", 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mtp")
    return cache(lambda kind: save_mtp_folder(directory / kind, kind))


def loaded_from(folder):
    """The model of a folder, its tokenizer and its head."""
    mlxdist.init()
    model, tokenizer = load_sharded(folder)
    return model, tokenizer, load_mtp_head(folder, plan_shards(model))


def worker_of(model, tokenizer, head, most, **limits):
    limits = BatchLimits(**{"prefill_step_size": 16, "num_draft_tokens": most} | limits)
    worker = Worker(MtpModel(model, head, Backbone(model.model)), tokenizer, limits)
    worker.warm_up()
    return worker


@pytest.mark.parametrize("kind", [*TWO, *OTHERS])
@pytest.mark.parametrize("most", [3, pytest.param(1, marks=pytest.mark.long)])
def test_overlapping_requests_get_the_tokens_of_mlx_lm_alone(folders, kind, most):
    model, tokenizer, head = loaded_from(folders(kind))
    generator = random.Random(most)
    requests = [random_admission(generator, number) for number in range(9)]
    expected = {request.number: alone((model, tokenizer), request) for request in requests}
    worker = worker_of(model, tokenizer, head, most)
    counts = counted(worker)
    assert run(worker, *(requests[start : start + 2] for start in range(0, 9, 2))) == expected
    assert 0 < counts[1] < counts[0]


@pytest.mark.parametrize("kind", [*TWO, *OTHERS])
def test_drafts_are_those_of_the_head_without_caches(folders, kind):
    """The first draft of each step, whatever has been rejected before; also behind what the prefix cache has."""
    model, tokenizer, head = loaded_from(folders(kind))
    prompt = [*range(40), 7]
    tokens = alone((model, tokenizer), admission(0, prompt, sampling=GREEDY))
    sequence = prompt + tokens
    worker = worker_of(model, tokenizer, head, 2)
    found = drafts_of(worker, admission(0, prompt, sampling=GREEDY), sequence)
    logits = plain_logits(model, head, sequence)
    assert len(found) > 10 and found == {place: mx.argmax(logits[place]).item() for place in found}
    cached: dict[int, int] = {}
    run(worker, [admission(1, prompt, sampling=GREEDY)], cached=cached)
    assert cached[1] == 40  # and so the hidden state before token 40 is not known, but all others
    found = drafts_of(worker, admission(2, prompt, sampling=GREEDY), sequence)
    logits = plain_logits(model, head, sequence, unknown={40})
    assert len(found) > 10 and found == {place: mx.argmax(logits[place]).item() for place in found}


def drafts_of(worker, request, sequence):
    """The first draft of each step of a greedy request, by the place of the token that it follows."""
    found, place, step = {}, len(request.prompt), 0
    while place < len(sequence):
        outcome = worker.step(Decisions(step, worker.digest, admit=[] if step else [request]))
        if outcome.tokens:
            (inputs,) = worker._generator.inputs
            if len(inputs) > 1:
                found[place] = inputs[1]
            assert sequence[place : place + len(outcome.tokens)] == [response.token for response in outcome.tokens]
            place += len(outcome.tokens)
        step += 1
    worker.step(Decisions(step, worker.digest, [(request.number, len(sequence))]))
    return found


@pytest.mark.parametrize(
    "kind, most", [("deepseek_v3", 1)] + [pytest.param(*each, marks=pytest.mark.long) for each in OTHER_COUNTS]
)
def test_steps_are_as_few_as_the_acceptance_says(tmp_path, kind, most):
    """A made head that is right after 80 % of the tokens; a greedy and a sampled request in a batch."""
    folder, following = agreeing_folder(tmp_path / kind, kind, 0.8)
    worker = worker_of(*loaded_from(folder), most)
    counts = counted(worker)
    requests = [admission(0, [3, 100], sampling=GREEDY)]
    requests.append(admission(1, [200], sampling=replace(SAMPLED, top_k=1), seed=3))
    requests = [replace(request, max_tokens=320, ignore_eos=True) for request in requests]
    found = run(worker, requests)
    for request in requests:
        token = request.prompt[-1]
        assert found[request.number] == [token := following[token] for _ in range(320)]
    steps = counts[0] / most  # of each request
    assert 640 / steps == pytest.approx(1 + counts[1] / steps, rel=0.02)
    assert 640 / steps == pytest.approx(sum(0.8**drafts for drafts in range(most + 1)), rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_before_a_conversion_are_the_same_head(folders, tmp_path, kind):
    original = with_original_weights(folders(kind), tmp_path / "original")
    mixed = shutil.copytree(folders(kind), tmp_path / "mixed")  # the head's beside what has been converted
    weights = mx.load(str(original / "model.safetensors"))
    own = {name: array for name, array in weights.items() if name.startswith(("mtp.", "model.layers.4."))}
    mx.save_safetensors(str(mixed / "mtp.safetensors"), own)
    mlxdist.init()
    plan = plan_shards(load_sharded(mixed)[0])
    heads = [load_mtp_head(folder, plan) for folder in (folders(kind), original, mixed)]
    expected, *others = (dict(tree_flatten(head.parameters())) for head in heads)
    for found in others:
        assert expected.keys() == found.keys()
        assert all(mx.allclose(array, found[name], atol=1e-5) for name, array in expected.items())


def test_folders_without_a_head_say_so(folders, tmp_path):
    mlxdist.init()
    folder = with_original_weights(folders("qwen3_next"), tmp_path / "missing")
    plan, weights = plan_shards(load_sharded(folder)[0]), mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)  # before the file changes

    def refused(match, kept=lambda name: True, **changed):
        chosen = {name: changed.get(name.replace(".", "_"), array) for name, array in weights.items() if kept(name)}
        mx.save_safetensors(str(folder / "model.safetensors"), chosen)
        with pytest.raises(InvalidArgument, match=f"^{folder} {match}") as error:
            load_mtp_head(folder, plan)
        assert "\n" not in str(error.value)
        load_sharded(folder)  # without the head

    without = (
        ", which mlx-lm leaves out when it converts a model; put those of the original into mtp.safetensors there, "
    )
    refused(f"has no MTP weights mtp.fc.weight{without}", lambda name: "mtp." not in name)
    for name in (
        "mtp.norm.weight",
        "mtp.layers.0.self_attn.o_proj.weight",
        "mtp.layers.0.mlp.experts.3.up_proj.weight",
    ):
        refused(f"has no MTP weights {name}{without}", lambda other: other != name)
    refused(
        r"has MTP weights mtp.fc.weight of shape \(64, 64\), and config.json says", mtp_fc_weight=mx.zeros((64, 64))
    )
    other = save_model_folder(tmp_path / "other")
    with pytest.raises(InvalidArgument, match=f"^{other} is a qwen3; --mtp is for DeepSeek-V3, Qwen3-Next and Qwen3.5"):
        load_mtp_head(other, plan_shards(load_sharded(other)[0]))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, ranks, options",
    [("deepseek_v3", 2, []), ("qwen3_next", 3, ["--num-draft-tokens", 1])]
    + [
        pytest.param(kind, ranks, options, marks=pytest.mark.long)
        for kind in KINDS
        for ranks, options in (
            (1, []),
            (2, ["--shard-vocabulary", "--num-draft-tokens", 5]),
            (3, ["--tp", 3] if kind == "deepseek_v3" else ["--rank-shares", "2,1,1"]),
            (4, ["--stream-weights"]),
            (2, ["--split-blocks"]),
        )
    ]
    + [
        pytest.param("deepseek_v3", 4, ["--tp", 2, "--ep", 2], marks=pytest.mark.long),
        pytest.param("qwen3_next", 2, ["--ep", 2], marks=pytest.mark.long),
    ],
)
def test_all_ranks_answer_as_one_process(folders, kind, ranks, options):
    require_answers(folders(kind), ranks, "--mtp", *options)


@pytest.mark.long
@pytest.mark.parametrize("kind", TWO)
def test_preempted_requests_and_grammars_are_as_without(folders, kind):
    """Requests that leave the batch, go on behind what the prefix cache has of them, and are sampled."""
    given = ["--max-context", 500, "--decode-concurrency", 3]
    generator = random.Random(7)
    bodies = [
        {"prompt": f"leaves {number}", "max_tokens": 400, "logit_bias": {"256": -100}, "priority": 5}
        for number in range(3)
    ]
    for number in range(12):
        body = random_request(generator) | {"priority": number % 3 - 1}
        if number % 4 == 0:
            body = {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2,9}!"}} | body
            body.pop("stop", None)
        bodies.append(body)
    with ServerProcess(folders(kind), 1, *given) as server:
        expected = [server.ask(body)["choices"] for body in bodies]
    with ServerProcess(folders(kind), 2, *given, "--mtp") as server, ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(server.ask, body) for body in bodies[:3]]
        assert wait_for(lambda: server.metrics()["running"] == 3, 30)
        answers += [threads.submit(server.ask, body) for body in bodies[3:]]
        assert [answer.result()["choices"] for answer in answers] == expected
        metrics = server.metrics()
        assert metrics["preempted_total"] > 0 and metrics["draft_tokens_total"] > 0
        assert server.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", TWO)
def test_the_model_may_be_quantized_and_its_head_not(tmp_path, kind):
    require_answers(save_mtp_folder(tmp_path / kind, kind, bits=8), 2, "--mtp")


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, options, wrong",
    [
        ("deepseek_v3", ["--pipeline"], "--mtp is for ranks that share every layer, not stages"),
        ("qwen3", [], "is a qwen3; --mtp is for DeepSeek-V3"),
    ],
)
def test_heads_that_cannot_be_served(tmp_path, kind, options, wrong):
    folder = save_model_folder(tmp_path / kind, kind)
    with pytest.raises(AssertionError, match=wrong) as error:  # it ends with its output
        ServerProcess(folder, 2, "--mtp", *options)
    assert str(error.value).count(wrong) >= 1
