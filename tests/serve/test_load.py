"""`mlxdist serve` under load: the same tokens as one process, and nothing that grows."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import ServerProcess, post, random_request, save_model_folder
from waiting import late, wait_for

pytestmark = pytest.mark.long
OPTIONS = ("--prefill-step-size", 64, "--prompt-cache-tokens", 2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def requests(model):
    """1,000, each with the answer of one process that has nothing else to do."""
    generator = random.Random(2)
    bodies = [random_request(generator) for _ in range(1000)]
    with ServerProcess(model, 1, *OPTIONS) as one:
        return [(body, one.ask(body)["choices"]) for body in bodies]


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_requests_get_the_tokens_of_one_process(model, requests, ranks):
    """They overlap, have prefixes that others have, stop words and long prompts; others leave in between."""

    def ask(number):
        body, expected = requests[number]
        if number % 5 == 0:  # another one, that leaves
            leaves = body | {"max_tokens": 400, "logit_bias": {"256": -100}, "stream": number % 2 == 0}
            with server.raw(post(leaves)):
                late(0.02 * (number % 4))
        return server.ask(body)["choices"] == expected

    with ServerProcess(model, ranks, *OPTIONS) as server, ThreadPoolExecutor(8) as threads:
        are_equal = list(threads.map(ask, range(len(requests))))
        assert all(are_equal), f"{are_equal.count(False)} answers differ, that to {requests[are_equal.index(False)]}"
        assert wait_for(lambda: server.metrics()["running"] == 0, 30)
        metrics = server.metrics()
        ended = sum(count for name, count in metrics.items() if name.startswith("requests_total"))
        assert ended == len(requests) * 6 // 5 and metrics['requests_total{outcome="cancelled"}'] > len(requests) // 10
        assert metrics["cached_prompt_tokens_total"] > 0 and metrics["prefix_cache_tokens"] <= 2000
        assert server.stop() == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_nothing_grows(model, pytestconfig):
    """Resident memory, threads and descriptors of launcher and ranks, and MLX's memory, over --soak seconds of load."""
    generator = random.Random(9)

    def measure(pid):
        threads, descriptors = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return resident, threads, descriptors

    with ServerProcess(model, 2, "--prompt-cache-tokens", 1000) as server, ThreadPoolExecutor(8) as threads:

        def load(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                assert all(threads.map(server.ask, [random_request(generator) for _ in range(95)]))
                for _ in range(5):
                    with server.raw(post({"prompt": "leaves", "max_tokens": 400, "logit_bias": {"256": -100}})):
                        pass
            assert wait_for(lambda: server.metrics()["running"] == 0, 30)
            for prompt in ("a" * 500, "b" * 500):  # the prefix cache has these two and nothing else
                server.text(prompt, 1)
            late(0.5)  # threads of connections end
            active = server.metrics()["active_memory_bytes"]
            return active, [measure(pid) for pid in (server.process.pid, *server.pids())]

        active, before = load(10)
        active_then, after = load(pytestconfig.getoption("--soak"))
        assert server.metrics()["generated_tokens_total"] > 1000
    print(f"MLX: {active:.0f} B, then {active_then:.0f} B; (resident B, threads, descriptors): {before}, then {after}")
    assert active_then - active < 16 << 10
    for (memory, *counts), (memory_then, *counts_then) in zip(before, after):
        assert counts_then == counts
        assert memory_then - memory < 16 << 20, (memory, memory_then)


@pytest.mark.parametrize(
    "kind, ranks",
    [
        ("llama", 2),
        ("gemma3_text", 2),
        ("mixtral", 2),
        ("qwen3_5", 2),
        ("qwen3_next", 2),
        ("deepseek_v3", 2),
        ("gpt_oss", 2),
        ("qwen3_moe", 3),
    ],
)
def test_models_of_other_kinds(tmp_path, kind, ranks):
    """Sliding windows, states of linear attention, latent attention, experts: batched, cached and cancelled alike."""
    folder = save_model_folder(tmp_path / kind, kind)
    generator = random.Random(3)
    bodies = [random_request(generator) for _ in range(10)]
    answers = {}
    for number in (1, ranks):
        with ServerProcess(folder, number, "--prefill-step-size", 16) as server, ThreadPoolExecutor(4) as threads:
            leaves = post({"prompt": "leaves", "max_tokens": 100, "logit_bias": {"256": -100}})
            with server.raw(leaves):
                answers[number] = [choices["choices"][0]["text"] for choices in threads.map(server.ask, bodies)]
            assert server.stop() == 0
    assert answers[ranks] == answers[1]
