"""`mlxdist serve` under load: the same tokens as one process, and nothing that grows."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import wait_for
from serving import ServerProcess, post, random_request, save_model_folder

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_requests_get_the_tokens_of_one_process(model, ranks):
    """50 that overlap, with some that leave in between, prefixes that others have, and long prompts."""
    generator = random.Random(ranks)
    bodies = [random_request(generator) for _ in range(50)]
    options = ["--prefill-step-size", 16, "--prompt-cache-tokens", 2000]
    with ServerProcess(model, 1, *options) as one:
        expected = [one.ask(body)["choices"] for body in bodies]

    def ask(number):
        if number % 5 == 0:  # another one, that leaves
            leaves = bodies[number] | {"max_tokens": 400, "logit_bias": {"256": -100}, "stream": number % 2 == 0}
            with server.raw(post(leaves)):
                time.sleep(0.02 * (number % 4))
        return server.ask(bodies[number])["choices"]

    with ServerProcess(model, ranks, *options) as server, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(len(bodies)))) == expected
        assert wait_for(lambda: server.metrics()["running"] == 0, 30)
        metrics = server.metrics()
        assert metrics['requests_total{outcome="cancelled"}'] == 10 and metrics["cached_prompt_tokens_total"] > 0
        assert metrics["prefix_cache_tokens"] <= 2000
        assert server.stop() == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_nothing_grows(model):
    """Resident memory, threads and descriptors of launcher and ranks over 200 requests after as many to warm up."""
    generator = random.Random(9)

    def measure(pid):
        threads, descriptors = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return resident, threads, descriptors

    with ServerProcess(model, 2, "--prompt-cache-tokens", 1000) as server, ThreadPoolExecutor(8) as threads:

        def load():
            bodies = [random_request(generator) for _ in range(190)]
            assert all(threads.map(server.ask, bodies))
            for _ in range(10):
                with server.raw(post({"prompt": "leaves", "max_tokens": 400, "logit_bias": {"256": -100}})):
                    pass
            assert wait_for(lambda: server.metrics()["running"] == 0, 30)
            time.sleep(0.5)  # threads of connections end
            return [measure(pid) for pid in (server.process.pid, *server.pids())]

        before = load()
        after = load()
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
