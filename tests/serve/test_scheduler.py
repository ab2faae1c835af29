"""Rank 0's decisions, without a model: who waits, who is admitted, who leaves."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from serving import PLAIN

from mlxdist.serve.decisions import FRAME, MAX_ADMISSIONS, MAX_CANCELS, Decisions
from mlxdist.serve.metrics import Metrics
from mlxdist.serve.refusal import Refusal
from mlxdist.serve.scheduler import Request, Scheduler
from mlxdist.serve.worker import Outcome


def scheduler_of(places=8, max_queue=8, **options):
    return Scheduler(places, max_queue, heartbeat=0.01, tokenizer=None, metrics=Metrics(), **options)


def request(tokens=3, timeout=60.0, is_connected=lambda: True, priority=0):
    admission = replace(PLAIN, prompt=[1] * tokens, segments=[("user", tokens)])
    return Request(admission, is_connected, timeout=timeout, priority=priority)


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
    scheduler, is_there = scheduler_of(), threading.Event()
    is_there.set()
    scheduler.submit(request(5000, is_connected=is_there.is_set))
    announced = scheduler.decide(0, FRAME, 0)
    is_there.clear()
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
    assert (decisions.cancel, admitted(decisions), lengths(decisions)) == ([1], [2], [2])
    assert steps(scheduler, 2)[-1].cancel == []  # of equal priority none takes the place of another
    made = [SimpleNamespace(uid=number, token=70, finish_reason="stop") for number in (0, 2)]
    scheduler.deliver(Outcome(tokens=made))
    _, again = decisions = scheduler.decide(2, FRAME, 0).admit
    assert (again.prompt, again.generated, again.max_tokens, again.number) == ([1, 1, 1, 60, 61], 2, 3, 4)
    assert again.segments == [("user", 3), ("assistant", 2)]


@pytest.mark.parametrize("how", ["cancelled", "disconnected", "late"])
def test_a_request_that_leaves_is_cancelled_in_the_next_message_and_its_place_taken(how):
    scheduler, is_there = scheduler_of(places=1), threading.Event()
    is_there.set()
    leaving = request(timeout=0.2 if how == "late" else 60, is_connected=is_there.is_set)
    scheduler.submit(leaving)
    scheduler.submit(request())
    assert admitted(scheduler.decide(0, FRAME, 0)) == [0]
    if how == "cancelled":
        leaving.cancel()
    elif how == "disconnected":
        is_there.clear()
    else:
        time.sleep(0.21)
    decisions = scheduler.decide(1, FRAME, 0)
    assert (list(decisions.cancel), admitted(decisions)) == ([0], [1])
    assert leaving.events.get_nowait().status == (504 if how == "late" else 499)
    assert scheduler.decide(2, FRAME, 0).cancel == []


def test_more_requests_leave_at_once_than_a_message_can_cancel():
    scheduler, is_there = scheduler_of(places=MAX_CANCELS + 5, max_queue=MAX_CANCELS + 5), threading.Event()
    is_there.set()
    requests = [request(is_connected=is_there.is_set) for _ in range(MAX_CANCELS + 5)]
    for each in requests:
        scheduler.submit(each)
    steps(scheduler, 1 + len(requests) // MAX_ADMISSIONS)
    is_there.clear()
    assert [len(each.cancel) for each in steps(scheduler, 3)] == [MAX_CANCELS, 5, 0]
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
        assert scheduler.decide(1, FRAME, 0) == Decisions(1, stop=True)
    else:
        scheduler.fail("rank 1 has died")
    for each in requests:
        refusal = each.events.get_nowait()
        assert refusal.status == 503 and str(refusal) == scheduler.unavailable
    with pytest.raises(Refusal, match="the server"):
        scheduler.submit(request())
    assert not any(scheduler.gauges().values())


def test_an_idle_server_waits_for_a_request_or_a_heartbeat():
    scheduler = Scheduler(1, 1, heartbeat=30, tokenizer=None, metrics=Metrics())
    timer = threading.Timer(0.1, scheduler.submit, [request()])
    start = time.monotonic()
    timer.start()
    assert admitted(scheduler.decide(0, FRAME, 0)) == [0]
    assert 0.1 <= time.monotonic() - start < 20
    timer.join()
    assert admitted(scheduler_of().decide(0, FRAME, 0)) == []
