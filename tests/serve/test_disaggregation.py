"""Prefill and decode ranks: options, and servers of 2 to 4 ranks against one process."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from serving import ServerProcess, save_model_folder
from waiting import wait_for

from mlxdist import InvalidArgument
from mlxdist.cli.serve import serve
from mlxdist.serve import BatchLimits, Layout, ServeOptions
from mlxdist.serve.disaggregation import check_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=8192)


@pytest.mark.parametrize(
    "prefill, decode, problem",
    [
        ((), (1,), "--prefill-ranks names no rank; give both --prefill-ranks and --decode-ranks"),
        ((0,), (), "--decode-ranks names no rank; give both --prefill-ranks and --decode-ranks"),
        ((0, 1), (2, 3), "--decode-ranks names rank 3, and the ranks are 0 to 2"),
        ((0, 0), (1, 2), "--prefill-ranks names rank 0 twice"),
        ((0, 1), (1, 2), "rank 1 is in both of --prefill-ranks and --decode-ranks"),
        ((0,), (2,), "rank 1 is in neither of --prefill-ranks and --decode-ranks"),
        ((1, 2), (0,), "rank 0, which has the requests, must be one of --prefill-ranks"),
    ],
)
def test_ranks_that_are_no_sides_are_refused(prefill, decode, problem):
    with pytest.raises(InvalidArgument, match=f"^serve: {problem}$"):
        check_ranks(ServeOptions("model", prefill_ranks=prefill, decode_ranks=decode), 3)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"limits": BatchLimits(num_draft_tokens=2)}, "there are no drafts"),
        ({"stream_weights": True}, "each rank reads the files"),
        ({"layout": Layout(plan="plan.json")}, "--plan and --rank-shares are for ranks that share one model"),
        ({"layout": Layout(rank_shares="memory")}, "--plan and --rank-shares are for ranks that share one model"),
    ],
    ids=str,
)
def test_options_that_sides_do_not_have_are_refused(options, problem):
    ServeOptions("model", **options).check()
    with pytest.raises(InvalidArgument, match=problem):
        ServeOptions("model", prefill_ranks=(0,), decode_ranks=(1,), **options).check()


def test_answers_are_those_of_one_process(run_ranks, model):
    given = json.dumps({"split_blocks": False, "limits": {"prefill_step_size": 64}})
    run_ranks("disaggregation.py", 2, model, "0", "1", given, "answers", "prefixes")


@pytest.mark.long
@pytest.mark.parametrize(
    "prefill, decode, options",
    [
        ("0", "1,2", {"split_blocks": False}),
        ("0,2", "1", {"split_blocks": False, "shard_vocabulary": True}),
        ("0,1", "2,3", {"split_blocks": True}),
        ("0,1", "2,3", {"split_blocks": False, "pipeline": True}),
    ],
    ids=str,
)
def test_answers_of_sides_with_several_ranks(run_ranks, model, prefill, decode, options):
    ranks = len(f"{prefill},{decode}".split(","))
    run_ranks("disaggregation.py", ranks, model, prefill, decode, json.dumps(options), "answers", "prefixes")


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, decode, options",
    [("gemma3_text", "1,2", {}), ("mamba", "1", {}), ("qwen3", "1,2", {"kv_bits": 8, "kv_group_size": 32})],
)
def test_other_caches_are_sent(run_ranks, tmp_path, kind, decode, options):
    fields = {"head_dim": 32} if options else {}
    folder, ranks = save_model_folder(tmp_path / kind, kind, **fields), 1 + len(decode.split(","))
    given = json.dumps({"split_blocks": False, "limits": {"prefill_step_size": 64}} | options)
    run_ranks("disaggregation.py", ranks, folder, "0", decode, given, "answers")


@pytest.mark.long
def test_caches_that_cannot_be_cut_for_other_ranks_are_refused(run_ranks, tmp_path):
    folder = save_model_folder(tmp_path / "model", "hunyuan")
    for output in run_ranks("disaggregation.py", 3, folder, "0,1", "2", "{}", "answers", status=None):
        assert re.search(r"kv: layer \d+, whose cache is \w+, cannot be sent", output), output


@pytest.mark.long
def test_streams_have_a_token_in_each_step_while_a_long_prompt_is_computed(run_ranks, model):
    given = json.dumps({"split_blocks": False, "limits": {"prefill_step_size": 512}})
    run_ranks("disaggregation.py", 2, model, "0", "1", given, "gaps", timeout=400)


@pytest.mark.long
def test_clients_that_leave_and_requests_that_wait_for_decode_ranks(run_ranks, model):
    given = json.dumps({"split_blocks": False, "limits": {"decode_concurrency": 1}})
    run_ranks("disaggregation.py", 2, model, "0", "1", given, "left", "room")


@pytest.mark.long
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_is_killed(model, victim):
    """It is a prefill rank, and a decode rank. The reason is the same for all requests."""
    sides = ["--prefill-ranks", "0,1", "--decode-ranks", "2", "--no-split-blocks"]
    with ServerProcess(model, 3, *sides, restarts=0) as server, ThreadPoolExecutor(4) as threads:
        body = {"prompt": "x y", "max_tokens": 4000, "logit_bias": {"256": -100}}
        streams = [threads.submit(server.stream, body) for _ in range(2)]
        assert wait_for(lambda: server.metrics()["generated_tokens_total"] > 20, 30)
        os.kill(server.pids()[victim], signal.SIGKILL)
        for stream in streams:
            assert f"rank {victim}" in stream.result()[-1] and "service_unavailable" in stream.result()[-1]
        assert server.process.wait(30) == 128 + signal.SIGKILL
        assert any(f"rank {victim} failed first, killed by SIGKILL" in line for line in server.lines)


def test_the_command_line_refuses_what_are_no_ranks():
    for text in ("", "a", "0-1", "0,,1", "-1"):
        result = CliRunner().invoke(serve, ["model", "--prefill-ranks", text, "--decode-ranks", "1"])
        assert result.exit_code == 2 and "are not ranks, such as 0,1" in result.output, result.output
