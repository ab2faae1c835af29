"""`mlxdist serve` with little memory and few places: all answers are those of one process with much of both."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ServerProcess, post, random_request, save_model_folder
from waiting import wait_for

pytestmark = pytest.mark.long
ENDLESS = {"logit_bias": {"256": -100}}  # the token that ends an answer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    "ranks, options",
    [
        (2, ["--max-total-tokens", 600]),
        (2, ["--max-total-tokens", 600, "--pipeline"]),
        (3, ["--decode-concurrency", 2]),
    ],
    ids=str,
)
def test_preempted_answers_are_those_of_one_process(model, ranks, options):
    generator = random.Random(ranks)
    first = [random_request(generator) | {"max_tokens": 150, "priority": 50} | ENDLESS for _ in range(3)]
    bodies = [random_request(generator) | {"priority": generator.choice([-3, 0, 2])} for _ in range(12)]
    with ServerProcess(model, 1) as one:
        expected = [one.ask(body)["choices"] for body in first + bodies]
    with ServerProcess(model, ranks, *options) as server, ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(server.ask, body) for body in first]
        assert wait_for(lambda: server.metrics()["running"] >= 2, 30)
        answers += [threads.submit(server.ask, body) for body in bodies]
        assert [answer.result()["choices"] for answer in answers] == expected
        assert wait_for(lambda: server.metrics()["running"] == 0, 30)
        metrics = server.metrics()
        assert metrics["preempted_total"] > 0 == metrics["reserved_tokens"]
        assert server.stop() == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_memory_has_no_room_for_is_refused_at_once(model, ranks):
    with ServerProcess(model, ranks, "--max-total-tokens", 50) as server:
        status, answer, _ = server.request({"prompt": "x" * 50, "max_tokens": 2})
        assert (status, "the prompt has 50 tokens, and at most 49 are served here" in str(answer)) == (400, True)
        answer = server.ask({"prompt": "x" * 40, "max_tokens": 400} | ENDLESS)
        assert answer["usage"]["completion_tokens"] == 10
        with server.raw(post({"prompt": "x" * 20, "max_tokens": 30} | ENDLESS)):
            assert server.text("y" * 20, 30)  # one after the other
        assert server.metrics()["prefix_cache_tokens"] <= 50


def test_a_model_that_leaves_no_memory_is_an_error_on_all_ranks(run_ranks, model):
    for output in run_ranks("serving.py", 2, model, "full", status=None):
        assert "InvalidArgument: serve: rank 1 has -" in output and "GB left for KV caches beside its weights" in output
