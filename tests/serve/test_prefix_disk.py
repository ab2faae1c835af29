"""The prefix cache on disk: memory evicts to it, and a server that is started again has what it had, and nothing that
is damaged or foreign."""

import os
import shutil
import signal

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import ArraysCache, KVCache
from serving import ServerProcess, save_adapters, save_model_folder
from small_disk import small_disk
from waiting import wait_for

import mlxdist
from mlxdist.serve.prefix_disk import PrefixDisk
from mlxdist.serve.prefix_tree import PrefixTree

PROMPTS = ["the first prompt of all", "another prompt", "another prompt that goes on " * 3]
CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def answers(server):
    """Texts, and how many tokens of each prompt the prefix cache had."""
    found = [server.ask({"prompt": prompt, "max_tokens": 6}) for prompt in PROMPTS]
    found.append(server.ask(CHAT, "/v1/chat/completions"))
    choices = [each["choices"][0] for each in found]
    texts = [each["text"] if "text" in each else each["message"]["content"] for each in choices]
    return texts, [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]


def run(model, ranks, folder, *options):
    """The answers of one run, the tokens of the prompts that the prefix cache had, and what the server has printed."""
    with ServerProcess(model, ranks, "--prompt-cache-dir", folder, *options) as server:
        assert server.metrics()["prefix_cache_tokens"] == 0
        texts, cached = answers(server)
        assert server.stop() == 0, "".join(server.lines)
    return texts, cached, "".join(server.lines)


def files(folder, rank=0, ranks=1):
    return sorted((folder / f"rank-{rank}-of-{ranks}").glob("*/*.safetensors"))


class Store:
    """A tree of one rank and its disk; keys and values are the tokens, states their sum."""

    def __init__(self, folder, max_bytes=1 << 40, hybrid=False, hourly=1 << 40, model="tokens", **limits):
        self.hybrid = hybrid
        self.disk = PrefixDisk(str(folder), max_bytes, mlxdist.init(), hourly)
        self.tree = PrefixTree(not hybrid, costs=(16.0, 8.0 if hybrid else 0.0), **limits)
        self.found = self.tree.open(self.disk, self.disk.open({"model": model}))

    def caches(self):
        return [KVCache(), ArraysCache(1)] if self.hybrid else [KVCache()]

    def insert(self, tokens):
        caches = self.caches()
        array = mx.array(tokens, mx.float32).reshape(1, 1, -1, 1)
        caches[0].update_and_fetch(mx.concatenate([array, array], -1), -mx.concatenate([array, array], -1))
        if self.hybrid:
            caches[1][0] = mx.array([[float(sum(tokens))]])
        self.tree.step += 10_000
        self.tree.insert(0, tokens, caches)

    def compare(self):
        """Waits for all writes, and takes what it has waited for."""
        assert wait_for(lambda: not self.disk._queue and not self.disk._pending)
        self.tree.compared(*self.tree.progress())

    def read(self, tokens):
        reading = self.tree.read(0, tokens)
        if reading is not None:
            self.tree.finish(reading, reading.count(wait=True))
        return reading is not None

    def fetch(self, tokens):
        """How many of the tokens there are, whose keys, values and states are right."""
        caches = self.caches()
        found = self.tree.fetch(0, tokens, caches)
        if found:
            assert caches[0].offset == found
            assert np.array_equal(np.array(caches[0].keys)[0, 0, :, 1], tokens[:found])
            assert np.array_equal(np.array(caches[0].values)[0, 0, :, 0], -np.array(tokens[:found]))
            assert not self.hybrid or caches[1][0].item() == sum(tokens[:found])
        return found


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_memory_evicts_comes_back(tmp_path, hybrid):
    store = Store(tmp_path, hybrid=hybrid, max_tokens=2000)
    first, second = list(range(1500)), [7, *range(1200)]
    store.insert(first)
    store.compare()
    store.insert(second)
    assert store.tree.tokens <= 2000 and store.fetch(first) < 1500
    assert store.read(first) and store.fetch(first) == 1500
    assert not store.read(first)
    store.compare()
    store.insert([8, *range(1800)])
    store.compare()
    assert store.fetch(first) < 700
    branch = [*first[:700], 9, 9, 9]
    store.insert(branch)  # splits a node that the disk alone has
    assert store.read(first) and store.fetch(first) == 1500
    store.insert([*first[:800], 9])  # and one that memory has, too
    store.compare()
    assert store.fetch(branch) == 703
    store.disk.close()
    again = Store(tmp_path, hybrid=hybrid)
    assert again.found and again.tree.tokens == 0 and again.tree.disk_bytes == store.tree.disk_bytes
    assert [again.read(one) and again.fetch(one) for one in (first, branch)] == [1500, 703]
    again.disk.close()


def test_a_prefix_of_what_the_disk_alone_has(tmp_path):
    """Of a request that was not read: it ends within a node. Both are there, also for another run."""
    store = Store(tmp_path, max_tokens=2000)
    first, branch = list(range(1500)), [*range(700), 9, 9]
    store.insert(first)
    store.compare()
    for tokens in (first[:600], branch):
        store.insert([7, *range(1900)])
        store.compare()
        assert store.fetch(first) == 0
        store.insert(tokens)
        store.compare()
    store.disk.close()
    again = Store(tmp_path)
    assert [again.read(each) and again.fetch(each) for each in (first, branch)] == [1500, 702]
    again.disk.close()


def test_what_the_disk_has_behind_a_node_that_is_split_stays(tmp_path):
    """Also where memory has no room for the halves before all ranks have written them."""
    store = Store(tmp_path)
    first = list(range(2500))
    store.insert(first)
    store.compare()
    store.disk.close()
    again = Store(tmp_path, max_tokens=3000)
    again.insert([*first[:100], 9, 9])
    again.insert([7, *range(2950)])
    again.compare()
    assert again.read(first) and again.fetch(first) == 2500
    again.disk.close()


def test_the_disk_keeps_to_its_size(tmp_path):
    store = Store(tmp_path, max_bytes=16 * 3000)
    for chat in range(10):
        store.insert([chat, *range(999)])
        store.compare()
        assert store.tree.disk_bytes <= 16 * 3000 and store.tree.tokens == 1000 * (chat + 1)
    assert wait_for(lambda: len(files(tmp_path)) == store.tree.disk_bytes / 16 / 500)
    store.disk.close()
    again = Store(tmp_path, max_bytes=16 * 1000)
    assert 0 < again.tree.disk_bytes <= 16 * 1000 and len(files(tmp_path)) == 2 < again.found
    again.disk.close()


def test_files_of_other_models_have_the_room_that_is_left(tmp_path):
    """Those of the model that has written nothing for the longest go first, and of these the ends of sequences."""
    sequences = {name: [number, *range(1999)] for number, name in enumerate(("first", "second", "third"))}
    for model in ("first", "second"):
        store = Store(tmp_path, model=model)
        store.insert(sequences[model])
        store.compare()
        store.disk.close()
    size = sum(path.stat().st_size for path in files(tmp_path))
    store = Store(tmp_path, model="third", max_bytes=size + 1)
    store.insert(sequences["third"][:900])
    store.compare()
    store.disk.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size
    found = {}
    for model, sequence in sequences.items():
        store = Store(tmp_path, model=model)
        store.read(sequence)
        found[model] = store.fetch(sequence)
        store.disk.close()
    assert found == {"first": 1024, "second": 2000, "third": 900}


def test_a_write_that_fails_is_left_out_and_the_next_ones_are_tried(tmp_path):
    store = Store(tmp_path, max_tokens=1500)
    store.insert(list(range(400)))
    store.compare()
    folder = files(tmp_path)[0].parent
    folder.rename(tmp_path / "away")
    store.insert([1, *range(400)])
    assert wait_for(lambda: store.tree.progress() == (1, 1))
    store.tree.compared(1, True)
    (tmp_path / "away").rename(folder)
    store.insert([2, *range(400)])
    store.compare()
    assert store.tree.progress() == (3, 0) and len(files(tmp_path)) == 2
    store.insert([3, *range(1400)])
    kept = [store.read([chat, *range(400)]) for chat in (0, 1, 2)]
    assert kept[1] is False and kept[2] is True
    store.disk.close()


def test_what_one_of_two_ranks_cannot_read_both_forget(tmp_path):
    stores = [Store(tmp_path / str(rank), max_tokens=3000) for rank in range(2)]
    tokens = list(range(2000))
    for store in stores:
        store.insert(tokens)
        store.compare()
        store.insert([5, *range(2900)])
    path = next(path for path in files(tmp_path / "1") if "-1024-" in path.name)
    path.write_bytes(path.read_bytes()[:-1])
    readings = [store.tree.read(0, tokens) for store in stores]
    count = min(reading.count(wait=True) for reading in readings)
    for store, reading in zip(stores, readings):
        store.tree.finish(reading, count)
    assert [store.fetch(tokens) for store in stores] == [1024, 1024]
    assert stores[0].tree.disk_bytes == stores[1].tree.disk_bytes
    assert wait_for(lambda: len(files(tmp_path / "0")) == len(files(tmp_path / "1")))
    for store in stores:
        store.disk.close()


def test_no_more_is_written_than_an_hour_may(tmp_path):
    """The rest waits, and what memory evicts meanwhile is not written."""
    store = Store(tmp_path, hourly=40_000, max_tokens=2000)
    for chat in range(6):
        store.insert([chat, *range(999)])
    assert wait_for(lambda: store.tree.progress()[0] >= 8)  # those that are not in memory are no longer due
    written = sum(path.stat().st_size for path in files(tmp_path))
    assert written < 80_000
    shutil.rmtree(tmp_path / "rank-0-of-1")
    store.disk.close()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_server_that_is_started_again_has_its_prefix_cache(model, tmp_path, ranks):
    texts, first, _ = run(model, ranks, tmp_path)
    again, cached, printed = run(model, ranks, tmp_path)
    assert again == texts and "parts of prompts and answers on disk" in printed
    assert cached[:3] == [len(prompt) - 1 for prompt in PROMPTS] and cached[3] > first[3]
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path, 0, ranks)} == {0o600}


@pytest.mark.long
def test_what_all_requests_adapt_is_not_used_for_requests_without_an_adapter(model, tmp_path):
    """The same adapter, under a name in the next run."""
    adapter = save_adapters(tmp_path / "adapter", model, seed=1)
    adapted, *_ = run(model, 1, tmp_path / "kept", "--adapter-path", adapter)
    texts, cached, _ = run(model, 1, tmp_path / "kept", "--adapter", f"x={adapter}")
    assert cached[0] == 0 and texts != adapted


@pytest.mark.long
@pytest.mark.parametrize("kind, ranks", [("gemma3_text", 2), ("qwen3_next", 2), ("deepseek_v3", 2), ("qwen3", 3)])
def test_caches_of_other_kinds(tmp_path, kind, ranks):
    """Sliding windows, states of linear attention, latent attention; ranks that share a KV head."""
    model = save_model_folder(tmp_path / kind, kind)
    texts, *_ = run(model, ranks, tmp_path / "kept")
    again, cached, _ = run(model, ranks, tmp_path / "kept")
    assert again == texts and all(cached)


@pytest.mark.long
def test_stages_keep_their_layers(model, tmp_path):
    texts, *_ = run(model, 2, tmp_path, "--pipeline")
    again, cached, _ = run(model, 2, tmp_path, "--pipeline")
    assert again == texts and all(cached)
    assert not run(model, 2, tmp_path)[1][0]


@pytest.mark.long
def test_what_one_rank_cannot_read_no_rank_uses(model, tmp_path):
    texts, *_ = run(model, 2, tmp_path)
    damaged, missing, *whole = files(tmp_path, 1, 2)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 4
    damaged.write_bytes(content)
    missing.unlink()
    again, cached, printed = run(model, 2, tmp_path)
    assert again == texts and any(cached)
    assert printed.count("saved prefix cache of rank 1") <= 1 and whole


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1, 7, 9, 60, 300, -1])
def test_flipped_bits_anywhere(model, tmp_path, place):
    """In the header, the tokens and the arrays of each file: the answers are right, and what is whole is used."""
    texts, *_ = run(model, 1, tmp_path)
    for path in files(tmp_path)[::2]:
        content = bytearray(path.read_bytes())
        content[place] ^= 16
        path.write_bytes(content)
    again, *_ = run(model, 1, tmp_path)
    assert again == texts
    assert run(model, 1, tmp_path)[1][:3] == [len(prompt) - 1 for prompt in PROMPTS]


@pytest.mark.long
def test_each_model_has_files_of_its_own(model, tmp_path):
    """Other weights of the same shapes. What a user has put there stays, and a write that was killed does not."""
    folder = tmp_path / "kept"
    texts, *_ = run(model, 1, folder)
    own = files(folder)[0].parent
    notes, unfinished = own / "notes.txt", own / f".{'a' * 32}-0-{'b' * 32}.safetensors-{'c' * 16}"
    notes.write_text("what a user has put there")
    unfinished.write_text("a write that was killed")
    other = save_model_folder(tmp_path / "other", seed=2)
    assert not run(other, 1, folder)[1][0]
    again, cached, _ = run(model, 1, folder)
    assert again == texts and all(cached)
    assert notes.exists() and not unfinished.exists()


@pytest.mark.long
def test_a_killed_server_has_what_was_written(model, tmp_path):
    with ServerProcess(model, 1, "--prompt-cache-dir", tmp_path) as server:
        texts, _ = answers(server)
        assert wait_for(lambda: len(files(tmp_path)) >= 4)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    again, cached, _ = run(model, 1, tmp_path)
    assert again == texts and all(cached)


@pytest.mark.long
def test_a_file_system_that_is_full(model, tmp_path):
    """It becomes full while a server writes, which goes on. What is whole is used by the next one, where it is full."""
    prompts = [f"{number} is the number of a question" + " that goes on and on" * 15 for number in range(8)]
    loaded = load(str(model))
    expected = ["".join(each.text for each in stream_generate(*loaded, prompt, max_tokens=6)) for prompt in prompts]
    with small_disk(tmp_path, "size=1m") as prefix:
        for run_number in range(2):
            with ServerProcess(model, 1, "--prompt-cache-dir", tmp_path, prefix=prefix) as server:
                found = [server.ask({"prompt": prompt, "max_tokens": 6}) for prompt in prompts]
                assert wait_for(lambda: "No space left on device" in "".join(server.lines))
                found += [server.ask({"prompt": prompt, "max_tokens": 6}) for prompt in prompts]
                assert server.stop() == 0, "".join(server.lines)
            texts = [each["choices"][0]["text"].rstrip("\ufffd") for each in found]
            assert texts == 2 * [text.rstrip("\ufffd") for text in expected]
            cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for each in found]
            assert all(cached[8:]) and (0 < sum(cached[:8]) < 8 if run_number else not any(cached[:8]))


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="file/rank-0-of-1 cannot be made: "):
        ServerProcess(model, 1, "--prompt-cache-dir", tmp_path / "file")
