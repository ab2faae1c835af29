"""Rank 0's end of the protocol, without a model: what comes of a request that fails, or waits too long."""

import asyncio
import contextlib
import os
import signal
import threading
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer
from test_preparation import CHATML, HELLO, LOOK, MODELS, save_model
from test_preparation_pool import children
from waiting import wait_for

from mlxdist.serve.decisions import FRAME
from mlxdist.serve.endpoint import Endpoint
from mlxdist.serve.metrics import Metrics
from mlxdist.serve.preparation_pool import PreparationPool
from mlxdist.serve.protocol import Generate, Grammar, Prompt
from mlxdist.serve.rank_zero import RankZero
from mlxdist.serve.refusal import Refusal
from mlxdist.serve.scheduler import Scheduler
from mlxdist.serve.worker import Outcome

VOCABULARY = 300
DEFAULTS = {"max_tokens": 16, "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def served(folder, timeout=60.0, pool=None):
    """(Endpoint, Scheduler), of which no rank carries out what it decides."""
    endpoint = Endpoint(pool or PreparationPool(folder, {}), ("tiny",), (), DEFAULTS, timeout, Metrics())
    scheduler = Scheduler(8, 8, heartbeat=0.01, metrics=endpoint.metrics)
    endpoint.open(scheduler, load_tokenizer(folder), VOCABULARY, 512, dict)
    with endpoint.running():
        yield endpoint, scheduler


class Asked:
    """A request, in a thread. ``events``: of its answer; ``refusal``: how it ends, without one."""

    def __init__(self, endpoint, prompt=Prompt(tokens=[1, 2]), **fields):
        self.refusal, self.events = None, []
        self._call = Generate(prompt=prompt, **fields)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(endpoint)))
        self._thread.start()

    async def _run(self, endpoint):
        try:
            async for event in RankZero(endpoint.connect).generate(self._call):
                self.events.append(event)
        except Refusal as refusal:
            self.refusal = refusal

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.refusal


def test_what_fails_unexpectedly_is_an_answer_and_not_a_lost_connection(folder, capfd):
    """A model whose numbers have overflowed: JSON has no NaN."""
    with served(folder) as (endpoint, scheduler):
        asked = Asked(endpoint, top_logprobs=0)
        assert wait_for(lambda: scheduler.gauges()["queued"] == 1)
        assert len(scheduler.decide(0, FRAME, 0).admit) == 1
        (letter,) = load_tokenizer(folder).encode("a", add_special_tokens=False)
        token = SimpleNamespace(uid=0, token=letter, logprobs=mx.full(VOCABULARY, mx.nan), finish_reason=None)
        scheduler.deliver(Outcome(cached={0: 0}, tokens=[token]))
        refusal = asked.join()
        assert refusal.status == 500 and str(refusal).startswith("the request has failed: ")
        assert wait_for(lambda: scheduler.decide(1, FRAME, 0).end == [(0, 3)])  # and the ranks compute it no more
    assert "a request has failed: ValidationError" in capfd.readouterr().err


def test_a_request_that_waits_for_its_tokens_has_its_timeout(folder):
    with served(folder, timeout=0.5) as (endpoint, _):
        assert wait_for(lambda: len(children()) == 1)
        os.kill(children()[0], signal.SIGSTOP)
        refusal = Asked(endpoint).join()
        assert (refusal.status, str(refusal)) == (504, "the request has taken too long")
        assert 'requests_total{outcome="timeout"} 1.0' in endpoint.metrics.text({})


@pytest.mark.long
def test_a_server_that_drains_for_ever_refuses_requests(folder):
    with served(folder) as (endpoint, scheduler):
        scheduler.stop(float("inf"))
        refusal = Asked(endpoint).join()
        assert (refusal.status, refusal.retry_after, str(refusal)) == (503, 600, "the server stops")


@pytest.mark.long
def test_who_waits_for_the_tokenizer_finds_a_process_that_takes_calls(folder, tmp_path):
    """Or goes on: where the process is stopped, and where it has no tokenizer."""
    pool = PreparationPool(folder, {})
    with served(folder, pool=pool) as (endpoint, _):
        endpoint.wait_for_tokenizer(60)
        assert pool._processes._idle.qsize() == 1
    pool = PreparationPool(folder, {})
    with served(folder, pool=pool) as (endpoint, _):
        assert wait_for(lambda: len(children()) == 1)
        os.kill(children()[0], signal.SIGSTOP)
        endpoint.wait_for_tokenizer(0.2)
        assert pool._processes._idle.empty()
        os.kill(children()[0], signal.SIGCONT)
    with served(folder, pool=PreparationPool(tmp_path, {})) as (endpoint, _):
        endpoint.wait_for_tokenizer(60)
        assert "the tokenizer of the model cannot be loaded" in str(Asked(endpoint).join())


class CountingPool(PreparationPool):
    """Counts the calls that it makes into tokens."""

    prepared = 0

    async def prepare(self, call):
        self.prepared += 1
        return await super().prepare(call)


def test_the_choices_of_a_prompt_are_prepared_once_and_sampled_each_by_its_seed(folder):
    pool = CountingPool(folder, {})
    with served(folder, pool=pool) as (endpoint, scheduler):
        asked = Asked(endpoint, n=3, seed=2**64 - 2, max_tokens=1)
        assert wait_for(lambda: scheduler.gauges()["queued"] == 3)
        admitted = scheduler.decide(0, FRAME, 0).admit
        assert pool.prepared == 1 and [each.prompt for each in admitted] == [[1, 2]] * 3
        assert [each.seed for each in admitted] == [2**64 - 2, 2**64 - 1, 0]
        made = [SimpleNamespace(uid=number, token=9 - number, finish_reason="length") for number in (2, 0, 1)]
        scheduler.deliver(Outcome(cached=dict.fromkeys(range(3), 0), tokens=made))
        assert asked.join() is None
    ends = [event.choice for event in asked.events if event.event == "finished"]
    assert sorted(ends) == [0, 1, 2] and len(asked.events) >= 6


def test_choices_without_a_place_in_the_queue_cancel_the_others(folder):
    with served(folder) as (endpoint, scheduler):
        refusal = Asked(endpoint, n=20).join()
        assert (refusal.status, str(refusal)) == (429, "8 requests wait already; try again later")
        scheduler.decide(0, FRAME, 0)
        assert scheduler.gauges() == {"running": 0, "queued": 0, "reserved_tokens": 0, "drafts_per_step": 0}


def test_a_choice_that_fails_ends_the_others(folder):
    with served(folder) as (endpoint, scheduler):
        asked = Asked(endpoint, n=2, top_logprobs=0)
        assert wait_for(lambda: scheduler.gauges()["queued"] == 2)
        scheduler.decide(0, FRAME, 0)
        token = SimpleNamespace(uid=1, token=65, logprobs=mx.full(VOCABULARY, mx.nan), finish_reason=None)
        scheduler.deliver(Outcome(cached={0: 0, 1: 0}, tokens=[token]))
        assert asked.join().status == 500
        assert wait_for(lambda: len(scheduler.decide(1, FRAME, 0).end) == 2 or not scheduler.gauges()["running"])


@pytest.mark.parametrize("fields", [{"stop_token_ids": [5]}, {"ignore_eos": True}, {"min_tokens": 3}])
def test_a_grammar_excludes_other_ends_by_their_names(folder, fields):
    (name,) = fields
    with served(folder) as (endpoint, _):
        refusal = Asked(endpoint, grammar=Grammar(kind="regex", value="a+"), **fields).join()
    assert (refusal.status, refusal.param) == (400, name) and str(refusal).startswith(f"{name} is not served with")


def test_thoughts_before_a_call_that_is_required_may_speak_of_calls(tmp_path):
    """mlx-lm's machine would begin a call there, to which all that follows belongs."""
    folder = save_model(tmp_path, MODELS["thinks"][0], CHATML)
    text = 'I <tool_call> it</think>\n[{"name": "look", "parameters": {"city": "x"}}]'
    prompt = Prompt(messages=[HELLO], tools=[LOOK], template_arguments={"begins": True, "enable_thinking": True})
    with served(folder) as (endpoint, scheduler):
        asked = Asked(endpoint, prompt, tool_choice="required", max_tokens=200)
        assert wait_for(lambda: scheduler.gauges()["queued"] == 1)
        announced = scheduler.decide(0, FRAME, 0)
        assert len(scheduler.decide(1, announced.next_size, 0).admit) == 1
        tokenizer = load_tokenizer(folder)
        tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        made = [SimpleNamespace(uid=0, token=token, finish_reason=None) for token in tokens]
        made[-1].finish_reason = "stop"
        scheduler.deliver(Outcome(cached={0: 0}, tokens=made))
        assert asked.join() is None
    assert "".join(event.reasoning for event in asked.events[1:-1]) == "I <tool_call> it"
    calls = [call for event in asked.events[1:-1] for call in event.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("look", '{"city": "x"}')]
    assert asked.events[-1].finish_reason == "tool_calls"
