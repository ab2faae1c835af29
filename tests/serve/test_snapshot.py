"""The prefix cache on disk: a server that is started again has what it had, and nothing that is damaged or foreign."""

import json

import pytest
from serving import ServerProcess, save_model_folder

PROMPTS = ["the first prompt of all", "another prompt", "another prompt that goes on " * 3]
CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def answers(server):
    """Texts, and how many tokens of each prompt the prefix cache had."""
    found = [server.ask({"prompt": prompt, "max_tokens": 6}) for prompt in PROMPTS]
    found.append(server.ask(CHAT, "/v1/chat/completions"))
    texts = [each["choices"][0].get("text") or each["choices"][0]["message"]["content"] for each in found]
    return texts, [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]


def run(model, ranks, folder, *options):
    """The answers of one run, the tokens in the prefix cache before and after them, and what the server has printed."""
    with ServerProcess(model, ranks, "--prompt-cache-dir", folder, *options) as server:
        before = server.metrics()["prefix_cache_tokens"]
        texts, cached = answers(server)
        server.ask(CHAT, "/v1/chat/completions")  # before it begins the cache has the answer before, which is the same
        after = server.metrics()["prefix_cache_tokens"]
        assert server.stop() == 0, "".join(server.lines)
    return texts, cached, (before, after), "".join(server.lines)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_server_that_is_started_again_has_its_prefix_cache(model, tmp_path, ranks):
    texts, _, (empty, tokens), _ = run(model, ranks, tmp_path)
    again, cached, (kept, _), printed = run(model, ranks, tmp_path)
    assert again == texts and kept == tokens > empty == 0 and "saved sequences with" in printed
    assert all(cached)


@pytest.mark.long
@pytest.mark.parametrize("kind, ranks", [("gemma3_text", 2), ("qwen3_next", 2), ("deepseek_v3", 2), ("qwen3", 3)])
def test_caches_of_other_kinds(tmp_path, kind, ranks):
    """Sliding windows, states of linear attention, latent attention; ranks that share a KV head."""
    model = save_model_folder(tmp_path / kind, kind)
    texts, _, (_, tokens), _ = run(model, ranks, tmp_path / "kept")
    again, cached, (kept, _), _ = run(model, ranks, tmp_path / "kept")
    assert again == texts and kept == tokens and all(cached)


@pytest.mark.long
def test_stages_keep_their_layers(model, tmp_path):
    texts, _, (_, tokens), _ = run(model, 2, tmp_path, "--pipeline")
    again, cached, (kept, _), _ = run(model, 2, tmp_path, "--pipeline")
    assert again == texts and kept == tokens and all(cached)
    _, cached, (kept, _), printed = run(model, 2, tmp_path)
    assert kept == 0 and printed.count("it is of another plan of shards; it is not used") == 2


@pytest.mark.long
def test_what_one_rank_cannot_read_no_rank_uses(model, tmp_path):
    texts, *_ = run(model, 2, tmp_path)
    folder = tmp_path / "rank-1-of-2"
    damaged, missing, *whole = json.loads((folder / "index.json").read_text())["sequences"]
    path = folder / f"{damaged['digest']}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0\1")
    (folder / f"{missing['digest']}.safetensors").unlink()
    again, _, (kept, _), printed = run(model, 2, tmp_path)
    assert again == texts
    assert kept == sum(len(sequence["tokens"]) for sequence in whole)
    assert printed.count("saved prefix cache of rank 1") == 2 and "its content has changed; it is not used" in printed


@pytest.mark.long
def test_a_snapshot_of_something_else_is_ignored(model, tmp_path):
    """Other weights of the same shapes, and an index that is none."""
    folder = tmp_path / "kept"
    run(model, 1, folder)
    other = save_model_folder(tmp_path / "other", seed=2)
    _, _, (kept, _), printed = run(other, 1, folder)
    assert kept == 0 and "it is of another model; it is not used" in printed
    (folder / "rank-0-of-1" / "index.json").write_text("[")
    _, _, (kept, tokens), printed = run(other, 1, folder)
    assert kept == 0 < tokens and "index.json is damaged: " in printed
    assert run(other, 1, folder)[2][0] == tokens


@pytest.mark.long
def test_a_smaller_limit_keeps_less(model, tmp_path):
    _, _, (_, tokens), _ = run(model, 2, tmp_path)
    limit = int(tokens) - 1
    _, _, (kept, _), _ = run(model, 2, tmp_path, "--prompt-cache-tokens", limit)
    assert 0 < kept <= limit


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="file/rank-0-of-1 cannot be made: "):
        ServerProcess(model, 1, "--prompt-cache-dir", tmp_path / "file")
