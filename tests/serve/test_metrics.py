"""The metrics of a server: what each call counts, as Prometheus reads it."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxdist.serve.metrics import HttpMetrics, Metrics

GAUGES = {"running": 2, "queued": 3, "reserved_tokens": 400, "prefix_cache_tokens": 5}
GAUGES |= {"drafts_per_step": 3, "prefix_cache_snapshots": 6, "prefix_cache_disk_bytes": 7e9}
GAUGES |= {"prefill_running": 8, "computed": 9, "transfers": 10}


def read(text):
    """Families by name without the prefix, and samples as the tests of servers read them."""
    families = list(text_string_to_metric_families(text))
    samples = {}
    for family in families:
        for name, labels, value, *_ in family.samples:
            shown = ",".join(f'{key}="{of}"' for key, of in sorted(labels.items()))
            samples[name.removeprefix("mlxdist_serve_") + (f"{{{shown}}}" if shown else "")] = value
    names = [family.name for family in families]
    assert len(names) == len(set(names)) and all(name.startswith("mlxdist_serve_") for name in names)
    return {family.name.removeprefix("mlxdist_serve_"): family for family in families}, samples


def counted(metrics):
    return read(metrics.text(GAUGES))[1]


def test_a_server_that_has_done_nothing_has_every_series():
    families, samples = read(Metrics().text({}))
    assert set(samples.values()) == {0.0}
    for name in ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "draft_tokens", "accepted_draft_tokens"):
        assert families[name].type == "counter" and samples[f"{name}_total"] == 0
    for name in ("preempted", "steps", "decision_bytes", "restarts"):
        assert families[name].type == "counter" and samples[f"{name}_total"] == 0
    for outcome in ("stop", "length", "cancelled", "timeout", "error", "refused"):
        assert samples[f'requests_total{{outcome="{outcome}"}}'] == 0
    for name in ("request_queue", "time_to_first_token", "inter_token", "request"):
        family = families[f"{name}_seconds"]
        assert family.type == "histogram" and samples[f"{name}_seconds_count"] == 0
    assert all(families[name].type == "gauge" for name in (*GAUGES, "active_memory_bytes"))
    assert all(family.documentation.endswith(".") for family in families.values())
    assert not any(name.endswith("_created") for name in samples)


def test_gauges_are_those_of_now():
    metrics = Metrics()
    assert {name: counted(metrics)[name] for name in GAUGES} == GAUGES
    assert read(metrics.text({"running": 0}))[1]["running"] == 0
    with pytest.raises(KeyError):
        metrics.text({"runing": 1})


def test_a_request_is_counted_from_its_arrival_to_its_end():
    metrics = Metrics(restarts=2)
    metrics.step(1024)
    metrics.admitted(0.2, 90, 60)
    metrics.first_token(0.5)
    metrics.token(0.04)
    metrics.token(0.0)  # a draft that was right: of the same step
    metrics.drafted(3, 1)
    metrics.preempted()
    metrics.ended("stop", 0.9)
    metrics.ended("cancelled", 500.0)
    metrics.ended("refused")
    found = counted(metrics)
    assert (found["steps_total"], found["decision_bytes_total"], found["restarts_total"]) == (1, 1024, 2)
    assert (found["prompt_tokens_total"], found["cached_prompt_tokens_total"]) == (90, 60)
    assert (found["draft_tokens_total"], found["accepted_draft_tokens_total"], found["preempted_total"]) == (3, 1, 1)
    assert found["generated_tokens_total"] == 3
    for name, seconds in (
        ("request_queue", 0.2),
        ("time_to_first_token", 0.5),
        ("inter_token", 0.04),
        ("request", 0.9),
    ):
        assert (found[f"{name}_seconds_count"], found[f"{name}_seconds_sum"]) == (1, pytest.approx(seconds)), name
    outcomes = ("stop", "length", "cancelled", "timeout", "error", "refused")
    assert [found[f'requests_total{{outcome="{each}"}}'] for each in outcomes] == [1, 0, 1, 0, 0, 1]


def test_an_outcome_that_is_none_is_an_error_of_the_program():
    with pytest.raises(KeyError):
        Metrics().ended("tool_calls")


def test_times_are_in_the_first_bucket_that_holds_them():
    metrics = Metrics()
    for seconds in (0.05, 0.051, 700.0):
        metrics.first_token(seconds)
    found = counted(metrics)
    buckets = {bound: found[f'time_to_first_token_seconds_bucket{{le="{bound}"}}'] for bound in ("0.05", "0.1", "+Inf")}
    assert buckets == {"0.05": 1, "0.1": 2, "+Inf": 3}


def test_each_rank_has_its_memory():
    metrics = Metrics()
    for rank, memory in ((0, 5), (1, 2**40), (0, 7)):
        metrics.memory(rank, memory)
    found = counted(metrics)
    assert (found['active_memory_bytes{rank="0"}'], found['active_memory_bytes{rank="1"}']) == (7, 2**40)


def test_sides_and_what_is_sent_between_them():
    metrics = Metrics()
    metrics.side("prefill", [0, 1])
    metrics.side("decode", [2])
    for size in (5, 2**40):
        metrics.received(size)
    found = counted(metrics)
    sides = {name: value for name, value in found.items() if name.startswith("rank_side")}
    of = {0: "prefill", 1: "prefill", 2: "decode"}
    assert sides == {f'rank_side{{rank="{rank}",side="{side}"}}': 1 for rank, side in of.items()}
    assert found["kv_bytes_total"] == 2**40 + 5


def test_two_servers_of_a_process_count_apart():
    one, other = Metrics(), Metrics()
    one.first_token(0.1)
    assert (counted(one)["generated_tokens_total"], counted(other)["generated_tokens_total"]) == (1, 0)


def test_threads_lose_no_count():
    metrics = Metrics()

    def count():
        for _ in range(2000):
            metrics.token(0.01)
            metrics.ended("refused")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.text(GAUGES)
    found = counted(metrics)
    assert found["generated_tokens_total"] == found["inter_token_seconds_count"] == 8000
    assert found['requests_total{outcome="refused"}'] == 8000


def test_answers_of_http_are_counted_by_path_and_status():
    metrics = HttpMetrics(["/v1/completions", "/health"])
    for path, status in (("/v1/completions", 200), ("/v1/completions", 200), ("/health", 503)):
        metrics.answered(path, status)
    for number in range(100):  # a client that looks for what is not there
        metrics.answered(f'/wp-admin/{number}\n"', 404)
    found = read(metrics.text())[1]
    assert found == {
        'http_requests_total{path="/v1/completions",status="200"}': 2,
        'http_requests_total{path="/health",status="503"}': 1,
        'http_requests_total{path="other",status="404"}': 100,
    }


def test_the_texts_of_rank_0_and_of_the_application_are_one_text():
    families, _ = read(Metrics().text(GAUGES) + HttpMetrics([]).text())
    assert {"http_requests", "requests"} <= set(families)
