"""Rank 0's decisions for prefill and decode ranks, without a model."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from serving import PLAIN, answer_of

from mlxdist.serve.decisions import FRAME, MAX_ADMISSIONS, MAX_SENDS, Decisions
from mlxdist.serve.disaggregated_scheduler import PrefillScheduler
from mlxdist.serve.metrics import Metrics
from mlxdist.serve.refusal import Refusal
from mlxdist.serve.remote_outcome import RemoteToken
from mlxdist.serve.scheduler import Request
from mlxdist.serve.worker import Outcome


def scheduler_of(places=8, tokens=(1000, 1000), heartbeat=0.01):
    ranks = (0, 1), (2, 3)
    return PrefillScheduler(places, 8, heartbeat, Metrics(), ranks, tokens)


def request(tokens=3, most=5, priority=0):
    admission = replace(PLAIN, prompt=[1] * tokens, segments=[tokens], max_tokens=most)
    return Request(admission, answer_of(), timeout=60.0, priority=priority)


def decided(scheduler):
    """The next decisions, as they are read."""
    return Decisions.decode(scheduler.decide(0, FRAME, 0).encode(FRAME))


def numbers(decisions):
    return [request.number for request in decisions.admit]


def computed(scheduler, *requests):
    """Submits requests, and has their prompts computed."""
    for one in requests:
        scheduler.submit(one)
    admitted = numbers(decided(scheduler))
    scheduler.deliver(Outcome(cached=dict.fromkeys(admitted, 0), computed=admitted))
    return admitted


def token(number, reason=None):
    return RemoteToken(number, 97, reason, 0.0, ())


def test_a_request_is_computed_sent_and_generated():
    scheduler, one = scheduler_of(), request()
    decode = scheduler.decode
    assert computed(scheduler, one) == [0]
    assert scheduler.gauges()["computed"] == 1
    assert numbers(decided(decode)) == [0] and decided(scheduler).send == [0]
    assert scheduler.gauges()["transfers"] == scheduler.gauges()["running"] == 1
    decode.deliver(Outcome())
    assert decided(decode).received == 0 and decided(scheduler).end == []
    decode.deliver(Outcome(received=1, received_bytes=10))
    assert decided(decode).received == 1 and decided(scheduler).end == [(0, 0)]
    decode.deliver(Outcome(received=1, tokens=[token(0), token(0, "length")]))
    assert decided(decode).end == [(0, 5)]
    assert not any(scheduler.gauges().values())
    events = [one.events.get_nowait() for _ in range(one.events.qsize())]
    assert [event.token for event in events[1:]] == [97, 97]


def test_a_computed_prompt_is_sent_before_the_next_chunk():
    scheduler = scheduler_of(heartbeat=60.0)
    computed(scheduler, request())
    scheduler.submit(request())
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(decided, scheduler)
        assert numbers(decided(scheduler.decode)) == [0]
        assert (following.result().send, numbers(following.result())) == ([0], [1])


def test_a_prompt_of_one_token_is_for_decode_ranks_alone():
    scheduler = scheduler_of()
    scheduler.submit(request(1))
    assert decided(scheduler).admit == [] and numbers(decided(scheduler.decode)) == [0]
    assert decided(scheduler).send == []


def test_decode_ranks_have_memory_for_a_request_before_its_cache_is_sent():
    scheduler = scheduler_of(tokens=(1000, 20))
    computed(scheduler, request(10, 5), request(10, 5))
    assert numbers(decided(scheduler.decode)) == [0] and decided(scheduler).send == [0]
    assert scheduler.gauges()["computed"] == 1 and decided(scheduler.decode).admit == []
    scheduler.decode.deliver(Outcome(received=1, tokens=[token(0, "length")]))
    assert numbers(decided(scheduler.decode)) == [1] and decided(scheduler).send == [1]


def test_prefill_ranks_count_computed_prompts_until_they_are_sent():
    scheduler = scheduler_of(tokens=(25, 1000))
    computed(scheduler, request(20))
    scheduler.submit(request(10))
    assert decided(scheduler).admit == []
    decided(scheduler.decode)
    scheduler.decode.deliver(Outcome(received=1))
    assert numbers(decided(scheduler)) == [1]


def test_a_request_that_leaves_while_it_waits_for_decode_ranks_is_freed():
    scheduler, first, second = scheduler_of(places=1), request(), request()
    computed(scheduler, first)
    decided(scheduler.decode)
    decided(scheduler)
    computed(scheduler, second)
    second.cancel()
    assert numbers(decided(scheduler.decode)) == []
    assert decided(scheduler).end == [(1, 0)] and scheduler.gauges()["computed"] == 0


def test_a_request_that_leaves_while_it_is_sent_is_freed_once_it_has_come():
    scheduler, one = scheduler_of(), request()
    computed(scheduler, one)
    decided(scheduler.decode)
    one.cancel()
    assert decided(scheduler.decode).end == [(0, 3)]
    then = decided(scheduler)
    assert (then.send, then.end) == ([0], [])
    scheduler.decode.deliver(Outcome(received=1))
    assert decided(scheduler).end == [(0, 0)]


def test_a_request_that_is_preempted_is_computed_again():
    scheduler, low = scheduler_of(places=1), request()
    computed(scheduler, low)
    decided(scheduler.decode)
    scheduler.decode.deliver(Outcome(received=1, tokens=[token(0)]))
    computed(scheduler, request(priority=-9))
    decisions = decided(scheduler.decode)
    assert decisions.end == [(0, 4)] and numbers(decisions) == [1]
    again = decided(scheduler).admit
    assert [list(one.prompt) for one in again] == [[1, 1, 1, 97]] and again[0].generated == 1


def test_sends_that_do_not_fit_are_in_the_next_message():
    scheduler = scheduler_of(places=20)
    for _ in range(3):
        computed(scheduler, *(request() for _ in range(MAX_ADMISSIONS)))
    for _ in range(3):
        decided(scheduler.decode)
    assert decided(scheduler).send == [*range(2 * MAX_ADMISSIONS)]
    assert decided(scheduler).send == [*range(MAX_SENDS, 3 * MAX_ADMISSIONS)]


def test_decode_ranks_stop_first_and_after_the_last_request():
    scheduler, one = scheduler_of(), request()
    computed(scheduler, one)
    scheduler.stop(drain=60)
    with pytest.raises(Refusal, match="the server stops"):
        scheduler.submit(request())
    assert not decided(scheduler).stop and numbers(decided(scheduler.decode)) == [0]
    scheduler.decode.deliver(Outcome(received=1, tokens=[token(0, "stop")]))
    assert not decided(scheduler).stop
    assert decided(scheduler.decode).stop and decided(scheduler).stop


def test_a_server_that_stops_at_once_sends_what_it_has_promised_and_ends_all_requests():
    scheduler, requests = scheduler_of(places=1), [request(), request(), request()]
    computed(scheduler, requests[0])
    decided(scheduler.decode)
    scheduler.submit(requests[1])
    decided(scheduler)
    scheduler.submit(requests[2])
    scheduler.stop()
    assert decided(scheduler.decode).stop
    scheduler.deliver(Outcome(computed=[1]))
    assert decided(scheduler).stop
    for one in requests:
        last = [one.events.get_nowait() for _ in range(one.events.qsize())][-1]
        assert isinstance(last, Refusal) and last.status == 503
