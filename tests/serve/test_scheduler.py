"""Rank 0's decisions, without a model: who waits, who is admitted, who leaves."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from serving import PLAIN, answer_of
from tokenizers.pre_tokenizers import ByteLevel
from waiting import late, seconds_of

from mlxdist.serve.answer import Answer, Token
from mlxdist.serve.decisions import FRAME, MAX_ADMISSIONS, MAX_ENDS, Decisions
from mlxdist.serve.metrics import Metrics
from mlxdist.serve.refusal import Refusal
from mlxdist.serve.scheduler import Request, Scheduler
from mlxdist.serve.worker import Outcome
from mlxdist.tools.bench.byte_model import byte_tokenizer


def scheduler_of(places=8, max_queue=8, **options):
    return Scheduler(places, max_queue, heartbeat=0.01, metrics=Metrics(), **options)


def request(tokens=3, timeout=60.0, priority=0, stop=()):
    admission = replace(PLAIN, prompt=[1] * tokens, segments=[tokens])
    return Request(admission, answer_of(*stop), timeout=timeout, priority=priority)


def steps(scheduler, number):
    """That many decisions, each in a message of the size that the one before announced."""
    size, found = FRAME, []
    for step in range(number):
        decisions = scheduler.decide(step, size, 0)
        assert Decisions.decode(decisions.encode(size)).step == step
        found.append(decisions)
        size = decisions.next_size
    return found


def admitted(decisions):
    return [request.number for request in decisions.admit]


def test_short_prompts_are_admitted_at_once_in_the_order_of_their_arrival():
    scheduler = scheduler_of()
    for _ in range(MAX_ADMISSIONS + 1):
        scheduler.submit(request())
    first, second, third = steps(scheduler, 3)
    assert admitted(first) == [0, 1, 2, 3] and admitted(second) == [4] and admitted(third) == []
    assert first.next_size == second.next_size == FRAME


def test_a_long_prompt_is_announced_and_comes_in_the_next_message():
    scheduler = scheduler_of()
    for tokens in (3, 5000, 3, 7000):
        scheduler.submit(request(tokens))
    first, second, third = steps(scheduler, 3)
    assert admitted(first) == [0]
    assert admitted(second) == [1, 2, 3] and first.next_size == FRAME + 4 * (5000 + 3 + 7000)
    assert admitted(third) == [] and third.next_size == FRAME


def test_what_is_announced_may_have_left():
    scheduler, leaving = scheduler_of(), request(5000)
    scheduler.submit(leaving)
    announced = scheduler.decide(0, FRAME, 0)
    leaving.cancel()
    scheduler.submit(request())
    then = scheduler.decide(1, announced.next_size, 0)
    assert admitted(then) == [0] and len(then.admit[0].prompt) == 3 and then.next_size == FRAME


def test_places():
    scheduler = scheduler_of(places=2)
    for _ in range(3):
        scheduler.submit(request())
    assert [admitted(each) for each in steps(scheduler, 3)] == [[0, 1], [], []]
    gauges = scheduler.gauges()
    assert (gauges["running"], gauges["queued"]) == (2, 1)


def test_a_full_queue_is_a_429_that_changes_nothing():
    scheduler = scheduler_of(places=1, max_queue=2)
    for _ in range(3):  # one of them has a place
        scheduler.submit(request())
    with pytest.raises(Refusal, match="2 requests wait already") as raised:
        scheduler.submit(request())
    assert raised.value.status == 429 and 1 <= raised.value.retry_after <= 600
    assert [admitted(each) for each in steps(scheduler, 2)] == [[0], []]
    with pytest.raises(Refusal, match="2 requests wait already"):
        scheduler.submit(request())


def lengths(decisions):
    """Of the prompts that are admitted, by which they are recognized."""
    return [len(request.prompt) for request in decisions.admit]


def test_the_least_priority_is_first_and_of_equal_ones_the_first_that_came():
    scheduler = scheduler_of()
    for tokens, priority in ((1, 0), (2, 5), (3, 0), (4, -1)):
        scheduler.submit(request(tokens, priority=priority))
    assert lengths(scheduler.decide(0, FRAME, 0)) == [4, 1, 3, 2]


def test_a_level_of_priority_is_worth_a_minute_of_waiting(monkeypatch):
    """So none waits for ever: behind those that come, for each level, up to a minute later."""
    scheduler, now = scheduler_of(), time.monotonic()
    for tokens, priority, seconds in ((1, 2, 0), (2, 0, 119), (3, 0, 121), (4, 1, 62)):
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        scheduler.submit(request(tokens, timeout=600, priority=priority))
    assert lengths(scheduler.decide(0, FRAME, 0)) == [2, 1, 3, 4]


def test_requests_wait_for_memory():
    """PLAIN has answers of 5 tokens; a batch has as many tokens of each request as of the longest."""
    scheduler = scheduler_of(max_total_tokens=30)
    for tokens in (5, 5, 10, 1):
        scheduler.submit(request(tokens))
    assert lengths(scheduler.decide(0, FRAME, 0)) == [5, 5]
    assert scheduler.gauges()["reserved_tokens"] == 20
    assert lengths(scheduler.decide(1, FRAME, 0)) == []  # 3 times 15 are 45; and the last one overtakes none


def generate(scheduler, *tokens):
    """A step in which each request that runs gets the next of these tokens."""
    made = [SimpleNamespace(uid=number, token=token, finish_reason=None) for number, token in tokens]
    scheduler.deliver(Outcome(tokens=made))


@pytest.mark.parametrize("limit", [{"places": 2}, {"max_total_tokens": 16}])
def test_a_request_preempts_those_that_come_after_it(limit):
    scheduler = scheduler_of(**limit)
    for priority in (0, 3):
        scheduler.submit(request(3, priority=priority))
    steps(scheduler, 1)
    generate(scheduler, (0, 50), (1, 60))
    generate(scheduler, (0, 51), (1, 61))
    for tokens, priority in ((2, 1), (1, 1)):
        scheduler.submit(request(tokens, priority=priority))
    decisions = scheduler.decide(1, FRAME, 0)
    assert (decisions.end, admitted(decisions), lengths(decisions)) == ([(1, 3 + 2)], [2], [2])
    assert steps(scheduler, 2)[-1].end == []  # of equal priority none takes the place of another
    made = [SimpleNamespace(uid=number, token=70, finish_reason="stop") for number in (0, 2)]
    scheduler.deliver(Outcome(tokens=made))
    decisions = scheduler.decide(2, FRAME, 0)
    assert decisions.end == [(0, 3 + 3), (2, 2 + 1)]
    _, again = decisions.admit
    assert (again.prompt, again.generated, again.max_tokens, again.number) == ([1, 1, 1, 60, 61], 2, 3, 4)
    assert again.segments == [3, 2]


BYTES = {character: token for token, character in enumerate(sorted(ByteLevel.alphabet()))}


def answers(each):
    """The tokens that a request has handed out, as pairs of text and finish_reason."""
    events = [each.events.get_nowait() for _ in range(each.events.qsize())]
    return [(event.text, event.finish_reason) for event in events if isinstance(event, Token)]


def test_a_stop_word_ends_a_request_in_the_next_message():
    """The tokens that were accepted beyond it in the same step are dropped; so is the reason why these have ended."""
    scheduler, stopped, other = scheduler_of(), request(stop=["cd"]), request()
    for each in (stopped, other):
        scheduler.submit(each)
    steps(scheduler, 1)
    generate(scheduler, *((0, BYTES[character]) for character in "abc"), (1, BYTES["c"]))
    assert answers(stopped) == [("a", None), ("b", None)] and answers(other) == [("c", None)]
    assert steps(scheduler, 1)[0].end == []
    made = [SimpleNamespace(uid=0, token=BYTES[each], finish_reason=None) for each in "dcd"]
    made.append(SimpleNamespace(uid=0, token=256, finish_reason="stop"))
    scheduler.deliver(Outcome(tokens=made, failed={0: "the answer ended too early"}))
    assert answers(stopped) == [("", "stop")] and len(stopped.generated) == 3
    assert [each.end for each in steps(scheduler, 2)] == [[(0, 3 + 2)], []]
    assert "generated_tokens_total 5" in scheduler._metrics.text({})


def test_a_stop_word_across_a_preemption():
    scheduler, stopped = scheduler_of(places=1), request(stop=["cd"], priority=1)
    scheduler.submit(stopped)
    steps(scheduler, 1)
    generate(scheduler, *((0, BYTES[character]) for character in "bc"))
    scheduler.submit(request())
    assert steps(scheduler, 1)[0].end == [(0, 3 + 2)]
    scheduler.deliver(Outcome(tokens=[SimpleNamespace(uid=1, token=256, finish_reason="stop")]))
    assert steps(scheduler, 1)[0].admit[0].prompt == [1, 1, 1, BYTES["b"], BYTES["c"]]
    generate(scheduler, (2, BYTES["d"]))
    assert answers(stopped) == [("b", None), ("", "stop")] and steps(scheduler, 1)[0].end == [(2, 3 + 1)]


def test_more_requests_finish_at_once_than_a_message_can_end():
    scheduler = scheduler_of(places=MAX_ENDS + 5, max_queue=MAX_ENDS + 5)
    for _ in range(MAX_ENDS + 5):
        scheduler.submit(request(stop=["a"]))
    steps(scheduler, 2 + MAX_ENDS // MAX_ADMISSIONS)
    generate(scheduler, *((number, BYTES["a"]) for number in range(MAX_ENDS + 5)))
    assert len(steps(scheduler, 1)[0].end) == MAX_ENDS
    generate(scheduler, (MAX_ENDS, BYTES["b"]))  # it still runs, on all ranks
    assert steps(scheduler, 1)[0].end == [(number, 3) for number in range(MAX_ENDS, MAX_ENDS + 5)]


def test_a_token_without_a_text_ends_its_request_alone():
    """A model may have logits for more tokens than its tokenizer has."""
    scheduler, wrong, other = scheduler_of(), request(), request()
    for each in (wrong, other):
        scheduler.submit(each)
    steps(scheduler, 1)
    detokenizer = SPMStreamingDetokenizer(byte_tokenizer("<|end|>"))
    wrong.answer = Answer(detokenizer, TextStateMachine(), "normal", [])
    generate(scheduler, (0, 300), (1, BYTES["b"]))
    refusal = wrong.events.get_nowait()
    assert refusal.status == 500 and "the tokens of the answer cannot be made into text" in str(refusal)
    assert answers(other) == [("b", None)] and steps(scheduler, 1)[0].end == [(0, 3 + 1)]


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_request_that_leaves_is_cancelled_in_the_next_message_and_its_place_taken(how):
    scheduler, leaving = scheduler_of(places=1), request(timeout=0.2 if how == "late" else 60)
    scheduler.submit(leaving)
    scheduler.submit(request())
    assert admitted(scheduler.decide(0, FRAME, 0)) == [0]
    if how == "cancelled":
        leaving.cancel()
    else:
        late(0.21)
    decisions = scheduler.decide(1, FRAME, 0)
    assert (decisions.end, admitted(decisions)) == ([(0, 3)], [1])
    assert leaving.events.get_nowait().status == (504 if how == "late" else 499)
    assert scheduler.decide(2, FRAME, 0).end == []


def test_more_requests_leave_at_once_than_a_message_can_end():
    scheduler = scheduler_of(places=MAX_ENDS + 5, max_queue=MAX_ENDS + 5)
    requests = [request() for _ in range(MAX_ENDS + 5)]
    for each in requests:
        scheduler.submit(each)
    steps(scheduler, 1 + len(requests) // MAX_ADMISSIONS)
    for each in requests:
        each.cancel()
    assert [len(each.end) for each in steps(scheduler, 3)] == [MAX_ENDS, 5, 0]
    assert all(each.events.get_nowait().status == 499 and each.events.empty() for each in requests)


def test_a_request_that_leaves_the_queue_is_never_admitted():
    scheduler = scheduler_of(places=1)
    for _ in range(2):
        scheduler.submit(request())
    steps(scheduler, 1)
    scheduler.submit(leaving := request())
    leaving.cancel()
    assert [admitted(each) for each in steps(scheduler, 2)] == [[], []]
    assert leaving.events.get_nowait().status == 499
    gauges = scheduler.gauges()
    assert (gauges["running"], gauges["queued"]) == (1, 1)


@pytest.mark.parametrize("end", ["stop", "fail"])
def test_the_end_is_told_to_all_requests(end):
    scheduler = scheduler_of(places=1)
    requests = [request(), request()]
    for each in requests:
        scheduler.submit(each)
    steps(scheduler, 1)
    if end == "stop":
        scheduler.stop()
        assert scheduler.decide(1, FRAME, 0) == Decisions(1, end=[], stop=True)
    else:
        scheduler.fail("rank 1 has died")
    for each in requests:
        refusal = each.events.get_nowait()
        assert refusal.status == 503 and str(refusal) == scheduler.unavailable
    with pytest.raises(Refusal, match="the server"):
        scheduler.submit(request())
    assert not any(scheduler.gauges().values())


def test_requests_may_end_after_the_signal_to_stop(monkeypatch):
    """They have the time to drain, or until the second signal. New ones are refused."""
    for second in (False, True):
        scheduler, running, waiting, now = scheduler_of(places=1), request(), request(), time.monotonic()
        for each in (running, waiting):
            scheduler.submit(each)
        steps(scheduler, 1)
        scheduler.stop(drain=20)
        assert scheduler.unavailable == "the server stops"
        with pytest.raises(Refusal, match="the server stops"):
            scheduler.submit(request())
        assert not steps(scheduler, 1)[0].stop
        made = [SimpleNamespace(uid=0, token=70, finish_reason="stop")]
        scheduler.deliver(Outcome(tokens=made))
        assert admitted(steps(scheduler, 1)[0]) == [1]
        if second:
            scheduler.stop(drain=20)
        else:
            monkeypatch.setattr(time, "monotonic", lambda: now + 21)
        assert steps(scheduler, 1)[0].stop
        assert waiting.events.get_nowait().status == 503 and running.events.get_nowait().finish_reason == "stop"
        monkeypatch.undo()


def test_a_server_that_drains_stops_with_its_last_request():
    scheduler = scheduler_of()
    scheduler.submit(request())
    steps(scheduler, 1)
    scheduler.stop(drain=1e9)
    scheduler.deliver(Outcome(tokens=[SimpleNamespace(uid=0, token=70, finish_reason="stop")]))
    decisions = steps(scheduler, 1)[0]
    assert decisions.stop and decisions.end == [(0, 3 + 1)]


def test_the_ranks_report_their_memory_now_and_then(monkeypatch):
    scheduler, now = scheduler_of(), time.monotonic()
    found = []
    for seconds in (0, 4, 6, 7, 10, 12):
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        found.append(steps(scheduler, 1)[0].reports)
    assert found == [False, False, True, False, False, True]


def test_a_request_is_woken_once_a_step():
    woken = []
    scheduler = scheduler_of()
    for number in range(2):
        each = request()
        each.wake = lambda number=number: woken.append(number)
        scheduler.submit(each)
    steps(scheduler, 1)
    generate(scheduler, (0, BYTES["a"]), (0, BYTES["b"]), (1, BYTES["c"]))
    assert woken == [0, 1]
    scheduler.fail("rank 1 has died")
    assert woken == [0, 1, 0, 1]


def test_an_idle_server_waits_for_a_request_or_a_heartbeat():
    scheduler = Scheduler(1, 1, heartbeat=30, metrics=Metrics())
    timer = threading.Timer(0.1, scheduler.submit, [request()])
    seconds, decisions = seconds_of(lambda: timer.start() or scheduler.decide(0, FRAME, 0))
    assert admitted(decisions) == [0] and 0.1 <= seconds < 20
    timer.join()
    assert admitted(scheduler_of().decide(0, FRAME, 0)) == []
