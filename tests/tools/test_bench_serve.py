"""`mlxdist bench serve`: that it runs, checks and judges. No test looks at the times of servers."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_bench import bench, require_times, results_of
from waiting import late

from mlxdist.tools.bench.serve import ALL_TOKENS, FIRST_TOKEN, NEXT_TOKEN, _is_right, targets
from mlxdist.tools.bench.serve_load import arrivals, ask_all, lengths
from mlxdist.tools.bench.serve_servers import ALONE, DRAFTS, MLX_LM, OURS, OWN_LAYERS, RING


@pytest.mark.long
def test_serve(tmp_path):
    """With one KV head, which mlx_lm.server cannot share between two ranks: it is left out, with its reason."""
    output = tmp_path / "results.json"
    arguments = ["--servers", f"{OURS},{OWN_LAYERS},{DRAFTS},{MLX_LM},{ALONE}"]
    arguments += ["--hidden", "128", "--layers", "2", "--repeats", "3"]
    arguments += ["--streams", "3", "--rate", "20", "--requests", "5", "--prompt-tokens", "9", "--answer-tokens", "6"]
    printed = bench("serve", *arguments, "--output", str(output)).stdout
    results = json.loads(output.read_text())
    operations = [ALL_TOKENS, FIRST_TOKEN, NEXT_TOKEN] * 2
    found = [(result["case"]["operation"], result["variant"]) for result in results["cases"]]
    assert found == [(operation, name) for operation in operations for name in (OURS, OWN_LAYERS, DRAFTS, ALONE)]
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
        assert (result["accepted"] is not None) == (result["variant"] == DRAFTS)
        assert result["answers"] == 3 * (3 if "streams" in result["case"] else 5)
    (failed,) = results["absent"]
    assert failed["variant"] == MLX_LM and failed["absent"].startswith("it failed in round 1 of 3: ")
    assert f"{MLX_LM} was not measured: it failed" in printed and "targets: 0 of 2 met" in printed
    assert re.search("[0-9]+% of the drafts became tokens", printed)


def test_what_is_rejected():
    assert "together are more than --max-context" in bench("serve", "--answer-tokens", "2000", status=2).stderr
    assert "there is no /no/model" in bench("serve", "/no/model", status=2).stderr
    assert "'gloo' is not one of" in bench("serve", "--servers", "gloo", status=2).stderr


def test_targets():
    for ours, met in ((1.0, [True, True]), (1.2, [False, False])):
        streams = results_of(ALL_TOKENS, **{OURS: ours, OWN_LAYERS: 9.0, MLX_LM: 1.4, RING: 1.6})
        for result in streams:
            result["case"] = result["case"] | {"streams": 8}
        cases = [*streams, *results_of(ALL_TOKENS, **{OURS: 9.0, MLX_LM: 1.0, RING: 1.0})]
        assert [target.judged()["met"] for target in targets({"cases": cases})] == met
    alone = results_of(ALL_TOKENS, **{OURS: 1.5, DRAFTS: 1.0, MLX_LM: 2.1, RING: 2.1})
    for result in alone:
        result["case"] = result["case"] | {"streams": 1}
    assert [target.judged()["met"] for target in targets({"cases": alone})] == [True, False, True]


def test_an_answer_is_compared_as_far_as_it_is_certain():
    certain, close = {"answer": "abcd", "certain": 4}, {"answer": "abcd", "certain": 2}
    assert [_is_right(text, certain) for text in ("abcd", "abc", "abcde", "abcx")] == [True, False, False, False]
    assert [_is_right(text, close) for text in ("abcd", "abxyz", "axcd", "a")] == [True, True, False, False]


def test_lengths_and_arrivals_have_their_means_and_are_those_of_the_seed():
    times, sizes = arrivals(4.0, 4000, 1), lengths(100, 1.0, 4000, 10_000, "1")
    assert times == arrivals(4.0, 4000, 1) and times == sorted(times) and times[0] == 0.0
    assert times[-1] == pytest.approx(1000, rel=0.1) and sum(sizes) / 4000 == pytest.approx(100, rel=0.1)
    assert arrivals(float("inf"), 3, 1) == [0.0, 0.0, 0.0]
    assert set(lengths(100, 1.0, 100, 1, "1")) == {1}


class Slow(BaseHTTPRequestHandler):
    """Two events, 0.2 s and 0.4 s after a request that is alone."""

    one_at_a_time = threading.Lock()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        with self.one_at_a_time:
            for text in "ab":
                late(0.2)
                self.send({"choices": [{"text": text}]})
        self.send({"choices": [], "usage": {"completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, event):
        self.wfile.write(b": keepalive\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *arguments):
        pass


def test_the_load_is_open_loop_and_times_are_from_the_arrival():
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answers, seconds = ask_all(server.server_port, [{"prompt": "x"}] * 3, [0.0, 0.01, 0.02])
        server.shutdown()
    assert [(answer.text, answer.tokens, len(answer.gaps)) for answer in answers] == [("ab", 2, 1)] * 3
    first = sorted(answer.first for answer in answers)  # the others wait while one is answered
    assert first[0] >= 0.19 and first[1] >= 0.55 and first[2] >= 0.95 and seconds >= 1.15
    assert all(answer.first + answer.gaps[0] >= 0.39 for answer in answers)
