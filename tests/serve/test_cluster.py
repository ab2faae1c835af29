"""GET /cluster: the ranks of a server as its page shows them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_zero import REASON, cluster_of, launcher_server, started
from serving import ServerProcess, save_model_folder
from waiting import wait_for


def view_of(client):
    status, view, headers = client.request("GET", "/cluster")
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    return view


def states(view):
    return [row["state"] for row in view["ranks"]]


def test_it_has_who_holds_what_and_what_the_ranks_do(client, rank_0):
    rank_0.cluster = cluster_of(2, running=1)
    view = view_of(client)
    assert (view["is_ready"], view["reason"], view["model"], view["layout"]) == (True, "", "tiny", "tp=2")
    assert view["requests"]["running"] == 1 and view["requests"]["cached_prompt_tokens"] == 30
    waits, late = view["ranks"]
    assert late["held"] == {"layers": "all layers", "bytes": 4_000_000_000, "share": 0.5}
    assert (late["host"], late["memory"], late["memory_limit"]) == ("mac-1", 5 * 10**9, 12 * 10**9)
    assert late["mlx_memory"] == {"active": 3 << 30, "peak": 4 << 30}
    assert (waits["operation"], waits["waiting_on"], waits["elapsed"]) == ("all_sum #7", 1, 3.0)
    assert states(view) == ["ok", "straggler"]
    assert view["findings"][0].startswith("Rank 1 computes since all_sum #6 at train.py:90 ended 2.0 s ago")


def test_no_rank_is_late_while_there_is_nothing_to_do(client, rank_0):
    view = view_of(client)
    assert states(view) == ["ok", "ok"] and view["findings"] == []


def test_a_rank_without_a_record_is_silent_and_one_that_is_gone_has_failed(client, rank_0):
    observation = rank_0.cluster["observation"]
    observation["notes"] = ["rank 1 has not responded for 1 s"]
    del observation["records"][1]
    view = view_of(client)
    assert states(view) == ["ok", "silent"] and view["notes"] == observation["notes"]
    observation["members"][1]["is_gone"] = True
    assert wait_for(lambda: states(view_of(client)) == ["ok", "failed"])


@pytest.mark.parametrize("wrong", [{"rank": 7}, {"host": 5}, {"operations": "x"}])
def test_a_record_that_is_none_is_named_and_the_others_are_shown(client, rank_0, wrong):
    rank_0.cluster["observation"]["records"][1] |= wrong
    view = view_of(client)
    assert "is not a flight record" in view["notes"][0] and states(view) == ["ok", "silent"]


def test_without_records_there_is_who_holds_what(client, rank_0):
    rank_0.cluster["observation"] = None
    view = view_of(client)
    assert states(view) == ["ok", "ok"] and view["ranks"][1]["held"]["share"] == 0.5


def test_decode_ranks_are_shown_too(client, rank_0):
    """Rank 0 knows what the prefill ranks hold, of which it is one."""
    rank_0.cluster["held"] = rank_0.cluster["held"][:1]
    view = view_of(client)
    assert states(view) == ["ok", "ok"] and [bool(row["held"]) for row in view["ranks"]] == [True, False]


def test_the_rank_that_failed_first_is_shown_until_the_ranks_are_back(client):
    assert view_of(client)["reason"] == "the model is being loaded"
    with started(client) as rank_0:
        assert wait_for(lambda: view_of(client)["is_ready"])
        rank_0.end()
        client.server.failed(REASON, 1.0, 1)
        assert wait_for(lambda: states(view_of(client)) == ["down", "failed"])
        view = view_of(client)
        assert (view["is_ready"], view["reason"]) == (False, f"the server has failed: {REASON}")
        assert view["ranks"][1]["held"] and view["requests"] is None
        with started(client, rank_0):
            assert wait_for(lambda: states(view_of(client)) == ["ok", "ok"])


def test_however_many_ask_the_ranks_are_asked_once(client, rank_0):
    with ThreadPoolExecutor(16) as threads:
        assert all(view["is_ready"] for view in threads.map(lambda _: view_of(client), range(64)))
    seconds = 64  # had each of them asked
    assert 1 <= rank_0.observed < seconds / 4


def test_it_needs_the_key():
    with launcher_server(api_key="a-long-key") as client, started(client):
        assert client.request("GET", "/cluster")[0] == 401
        status, view, _ = client.request("GET", "/cluster", Authorization="Bearer a-long-key")
        assert status == 200 and view["is_ready"]


def test_the_ranks_of_a_server(tmp_path):
    """A process without a launcher has them, too; the same with ranks is in the tests of the page."""
    with ServerProcess(save_model_folder(tmp_path / "tiny")) as server:
        server.text("hello")
        view = server.ask(None, "/cluster")
        assert (view["model"], view["layout"], view["is_ready"]) == ("tiny", "one rank", True)
        (row,) = view["ranks"]
        assert row["state"] == "ok" and row["held"]["share"] == 1 and row["memory"] > row["held"]["bytes"] > 0
        assert view["requests"]["prompt_tokens"] == 5
        assert server.stop() == 0
