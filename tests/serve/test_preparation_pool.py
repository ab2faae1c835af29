"""The processes that tokenize beside rank 0: what happens when they die, compute too long, or lose rank 0."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest
from test_preparation import CHAT_TOKENS, HELLO, LOOK, PLAIN, save_model
from waiting import wait_for

from mlxdist.serve.preparation_pool import PreparationPool
from mlxdist.serve.protocol import Detokenize, Generate, Grammar, Prompt, Tokenize, ToolCall
from mlxdist.serve.refusal import Refusal

# transformers ends a loop of more than 100,000 rounds, but not two in each other.
ENDLESS = (
    "{% for m in messages %}{% if m.content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), template=ENDLESS + PLAIN)


def run(folder, test, **options):
    """Runs ``test`` with a pool, after which no process of it is left."""

    async def main():
        pool = PreparationPool(folder, {}, **options)
        pool.context, pool.vocabulary = 2048, 300
        await pool.start()
        try:
            await test(pool)
        finally:
            await pool.close()

    asyncio.run(main())
    assert children() == []


def children(parent=None):
    """The processes that tokenize, of this process or of another one."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent or os.getpid()), "-f", "preparation_child"], capture_output=True, text=True
    )
    return [int(line) for line in found.stdout.split()]


def chat(content, **fields):
    return Generate(prompt=Prompt(messages=[HELLO | {"content": content}]), wants_prompt=True, **fields)


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs Linux's /proc")
def test_the_processes_know_no_secret_and_are_no_rank(folder, monkeypatch):
    """The launcher finds those that a job has left behind by its name."""
    for name, value in {"SECRET": "ab" * 16, "API_KEY": "a-long-key", "RANK": "0", "JOB": "named"}.items():
        monkeypatch.setenv(f"MLXDIST_{name}", value)

    async def test(pool):
        assert await text_of(pool, "x")
        (child,) = children()
        with open(f"/proc/{child}/environ", "rb") as file:
            known = {word.partition(b"=")[0] for word in file.read().split(b"\0")}
        assert known & {b"MLXDIST_SECRET", b"MLXDIST_API_KEY", b"MLXDIST_RANK", b"MLXDIST_JOB"} == {b"MLXDIST_JOB"}

    run(folder, test)


async def text_of(pool, content):
    return (await pool.prepare(chat(content))).prompt_text


def rendered(content):
    return f"<|im_start|>user\n{content}<|im_end|>"


def test_each_kind_of_call(folder):
    async def test(pool):
        made = await pool.prepare(chat("Zürich?", grammar=Grammar(kind="regex", value="a+")))
        assert made.prompt_text == rendered("Zürich?") and "a+" in made.grammar
        tokens = await pool.tokenize(Tokenize(model="tiny", prompt=Prompt(text="Zürich?")))
        assert (tokens["model"], tokens["max_model_len"], len(tokens["tokens"])) == ("tiny", 2048, 8)
        assert await pool.detokenize(Detokenize(tokens=tokens["tokens"])) == {"prompt": "Zürich?"}
        arguments = '{"city": "Zürich"}'
        assert await pool.parse_calls(arguments, [LOOK], "arguments", "look") == [
            ToolCall(name="look", arguments=arguments)
        ]
        assert await pool.parse_calls(arguments[:-3], [LOOK], "arguments", "look") is None
        assert len(children()) == 1

    run(folder, test)


@pytest.mark.long
def test_a_call_of_a_tool_that_takes_too_long_to_parse_is_none(tmp_path):
    """The answer goes on, with text in its place; so it does if no process can parse the call."""
    folder = save_model(tmp_path, [*CHAT_TOKENS, "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"])
    call = '<|open|>call tool="look"<|sep|><|open|>json<|sep|>{"days": 2}<|close|>json<|sep|><|close|>call<|sep|>'

    async def test(pool):
        expected = [ToolCall(name="look", arguments='{"days": 2}')]
        assert await pool.parse_calls(call, [LOOK], "text", "") == expected
        (child,) = children()
        assert await pool.parse_calls("<|open|>call " * 20_000, [LOOK], "text", "") is None
        assert children() != [child]
        assert await text_of(pool, "after") == rendered("after")

    run(folder, test, cpu_seconds=0.5)


def test_a_refusal_comes_whole_and_ends_no_process(folder):
    async def test(pool):
        await text_of(pool, "first")
        before = children()
        for _ in range(2):
            with pytest.raises(Refusal) as caught:
                await pool.prepare(Generate(prompt=Prompt(tokens=[1] * 4096)))
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert children() == before

    run(folder, test)


def test_the_limits_are_those_that_are_set_later(folder):
    async def test(pool):
        await text_of(pool, "first")
        pool.context, pool.vocabulary, pool.has_grammars = 8, 200, False
        with pytest.raises(Refusal, match="structured output is not served with this model"):
            await pool.prepare(Generate(prompt=Prompt(text="a"), grammar=Grammar(kind="regex", value="a")))
        with pytest.raises(Refusal, match="at most 7 are served here"):
            await text_of(pool, "a long question")
        with pytest.raises(Refusal, match="they are 0 to 199"):
            await pool.prepare(Generate(prompt=Prompt(tokens=[257])))

    run(folder, test)


@pytest.mark.long
def test_calls_at_a_time_are_for_a_few_processes(folder):
    async def test(pool):
        contents = [f"question {number}" for number in range(40)]
        found = await asyncio.gather(*(text_of(pool, content) for content in contents))
        assert found == [rendered(content) for content in contents]
        assert len(children()) <= 2

    run(folder, test, processes=2)


def test_a_process_that_was_killed_is_replaced(folder):
    async def test(pool):
        await text_of(pool, "before")
        (child,) = children()
        os.kill(child, signal.SIGKILL)
        assert await text_of(pool, "after") == rendered("after")
        assert children() != [child]

    run(folder, test, processes=1)


@contextlib.asynccontextmanager
async def stopped(pool, *contents):
    """The only process, which does not go on, and calls, of which it has taken the first."""
    await text_of(pool, "before")
    (child,) = children()
    os.kill(child, signal.SIGSTOP)
    calls = [asyncio.create_task(text_of(pool, content)) for content in contents]
    await asyncio.sleep(0)  # so that they begin
    yield child, *calls
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)


@pytest.mark.long
def test_a_call_whose_process_is_killed_is_made_again(folder):
    async def test(pool):
        async with stopped(pool, "question") as (child, call):
            os.kill(child, signal.SIGKILL)
            assert await call == rendered("question")

    run(folder, test, processes=1)


@pytest.mark.long
def test_a_call_that_no_process_survives_is_refused(folder):
    async def test(pool):
        call = asyncio.create_task(text_of(pool, "endless"))
        while not call.done():
            for child in children():
                os.kill(child, signal.SIGKILL)
            await asyncio.sleep(0.05)
        assert call.exception().status == 503
        assert await text_of(pool, "after") == rendered("after")

    run(folder, test, processes=1)


@pytest.mark.long
def test_a_call_beyond_its_cpu_time_is_refused_and_its_process_replaced(folder):
    async def test(pool):
        await text_of(pool, "before")
        (child,) = children()
        with pytest.raises(Refusal, match="takes too much time to be made into tokens") as caught:
            await text_of(pool, "endless")
        assert caught.value.status == 400
        assert await text_of(pool, "after") == rendered("after")
        assert children() != [child]

    run(folder, test, processes=1, cpu_seconds=0.5)


@pytest.mark.long
def test_cpu_time_is_that_of_one_call(folder):
    """And not of all that a process has served: to load the tokenizer takes more."""

    async def test(pool):
        await text_of(pool, "before")
        before = children()
        for number in range(300):
            await text_of(pool, f"question {number} " * 50)
        assert children() == before

    run(folder, test, processes=1, cpu_seconds=0.3)


@pytest.mark.long
def test_a_call_on_a_machine_that_is_too_busy_is_refused(folder):
    async def test(pool):
        async with stopped(pool, "question") as (_, call):
            with pytest.raises(Refusal, match="this machine is too busy") as caught:
                await call
            assert (caught.value.status, caught.value.retry_after) == (503, 5)

    run(folder, test, processes=1, timeout=5.0)


@pytest.mark.long
def test_a_call_waits_for_no_other_one(folder):
    async def test(pool):
        async with stopped(pool, "first") as (_, first):
            assert await text_of(pool, "second") == rendered("second")
            assert not first.done()
        assert await first == rendered("first")

    run(folder, test, processes=2)


@pytest.mark.long
def test_long_prompts_wait_for_each_other_alone(folder):
    """Also the first one, while the process for long ones starts."""

    async def test(pool):
        await text_of(pool, "before")
        long = [asyncio.create_task(text_of(pool, letter * 300_000)) for letter in "xyz"]
        assert await text_of(pool, "short") == rendered("short")
        assert not any(call.done() for call in long)
        for refused in await asyncio.gather(*long, return_exceptions=True):
            assert refused.code == "context_length_exceeded"
        assert len(children()) == 2

    run(folder, test, processes=1)


@pytest.mark.long
def test_the_answer_to_a_cancelled_call_is_not_that_of_the_next(folder):
    async def test(pool):
        async with stopped(pool, "first") as (child, first):
            first.cancel()
            second = asyncio.create_task(text_of(pool, "second"))
            await asyncio.gather(first, return_exceptions=True)
        assert await second == rendered("second")
        assert first.cancelled() and children() == [child]

    run(folder, test, processes=1)


@pytest.mark.long
def test_signals_to_the_group_end_no_process(folder):
    """Rank 0 serves the requests that run after SIGTERM, and parses their calls of tools."""

    async def test(pool):
        await text_of(pool, "before")
        before = children()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(before[0], number)
        assert await text_of(pool, "after") == rendered("after")
        assert children() == before

    run(folder, test)


@pytest.mark.long
def test_all_calls_get_the_reason_why_there_is_no_tokenizer(tmp_path):
    (save_model(tmp_path) / "tokenizer.json").write_text('{"version": ')

    async def test(pool):
        for count in (5, 1):
            found = await asyncio.gather(*(text_of(pool, "x") for _ in range(count)), return_exceptions=True)
            assert [error.status for error in found] == [500] * count
            assert all(str(error).startswith("the tokenizer of the model cannot be loaded: ") for error in found)

    run(tmp_path, test)


def test_calls_that_wait_for_a_process_end_with_the_pool(folder):
    async def test(pool):
        call = asyncio.create_task(text_of(pool, "question"))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(Refusal, match="the server ends"):
            await call

    run(folder, test)


RANK_0 = """
import asyncio, sys
from pathlib import Path
from mlxdist.serve.preparation_pool import PreparationPool
from mlxdist.serve.protocol import Generate, Prompt

async def main():
    pool = PreparationPool(Path(sys.argv[1]), {}, cpu_seconds=1000, timeout=1000)
    pool.context, pool.vocabulary = 2048, 300
    ask = lambda content: pool.prepare(Generate(prompt=Prompt(messages=[{"role": "user", "content": content}])))
    await ask("hello")
    calls = [asyncio.create_task(ask("endless")), asyncio.create_task(ask("hello"))]
    await calls[1]
    print("ready", flush=True)
    await calls[0]

asyncio.run(main())
"""


@pytest.mark.long
def test_processes_end_when_rank_0_is_killed(folder):
    """An idle one, and one that computes."""
    rank_0 = subprocess.Popen([sys.executable, "-c", RANK_0, str(folder)], stdout=subprocess.PIPE)
    with rank_0:
        assert rank_0.stdout.readline() == b"ready\n"
        left = children(rank_0.pid)
        rank_0.kill()
    assert len(left) == 2
    assert wait_for(lambda: not any(map(is_running, left)))


def is_running(process):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")
