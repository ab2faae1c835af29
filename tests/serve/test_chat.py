"""`mlxdist chat`: answers in a pipe and on a terminal are those of the server to the same messages."""

import asyncio
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys

import pytest
from serving import ENVIRONMENT, ServerProcess, save_model_folder

from mlxdist.serve.chat import ChatOptions, Terminal

SYSTEM = {"role": "system", "content": "be brief"}
RANKS = [1, pytest.param(2, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=100_000)


@pytest.fixture(scope="module")
def answers(model):
    """A function: what a server on one process answers to questions, of which each has all before it as its history."""

    def ask(questions, **fields):
        messages, found = [SYSTEM], []
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = server.ask({"messages": messages} | fields, "/v1/chat/completions")
            found.append(answer["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": found[-1]})
        return found

    with ServerProcess(model) as server:
        yield ask


def command(model, ranks, *options):
    words = [sys.executable, "-P", "-m", "mlxdist", "chat", model, "--system-prompt", SYSTEM["content"], *options]
    return [*map(str, words), *(["-n", str(ranks)] if ranks > 1 else [])]


def piped(model, ranks, text, *options):
    return subprocess.run(
        command(model, ranks, *options), env=ENVIRONMENT, input=text, capture_output=True, timeout=90, text=True
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_a_pipe_of_questions_gets_the_answers_of_the_server(model, answers, ranks):
    done = piped(model, ranks, "hello\nand more\nr\nhello\n", "-m", 8, "--seed", 4, "--temp", 1)
    first, second = answers(["hello", "and more"], max_tokens=8, seed=4, temperature=1.0)
    assert first and (done.stdout, done.returncode) == (f"{first}\n{second}\n{first}\n", 0), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_answered_is_an_error(model, ranks):
    done = piped(model, ranks, "x" * 50 + "\n", "--max-context", 20)
    assert done.returncode == 2 and "chat: the prompt has 61 tokens, and at most 19 are served here" in done.stderr
    assert piped(model, ranks, "hello\n", "--temp", "1e-9").returncode == 2


class Screen:
    """A chat on a terminal."""

    def __init__(self, model, ranks, *options):
        self._own, other = pty.openpty()
        words = command(model, ranks, *options)
        # The terminal is that of the command's session, so that Ctrl-C is its SIGINT.
        leader = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", leader, *words],
            env=ENVIRONMENT, stdin=other, stdout=other, stderr=other, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.shown = ""

    def type(self, text):
        os.write(self._own, text.encode())

    def wait_for(self, pattern, seconds=60):
        """What comes up to the end of ``pattern``, which is removed from ``shown``. ``seconds``: without any output."""
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert select.select([self._own], [], [], seconds)[0], self.shown
            self.shown += re.sub(r"\x1b\[[0-9;]*m|\r", "", os.read(self._own, 4096).decode(errors="replace"))
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
def test_a_terminal(model, answers, ranks):
    """Ctrl-C stops an answer and not the chat; twice before a question, it ends it."""
    with Screen(model, ranks, "-m", 50_000) as screen:
        screen.wait_for("is ready, ranks: .*\n> ")
        screen.type("endless\n")
        screen.wait_for("endless\n.{20}")
        screen.type("\x03")
        screen.wait_for(r"\n\d+ tokens, the first after [\d.]+ s, [\d.]+ tokens/s\ncancelled\n> ")
        screen.type("r\n")
        screen.wait_for("forgotten\n> ")
        screen.type("h\n")
        screen.wait_for("q: exit, .*\n> ")
        screen.type("\x03")
        screen.wait_for("Ctrl-C again, or q, ends the chat")
        screen.type("\x03")
        assert screen.process.wait(30) == 0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("end", ["q\n", "\x04", signal.SIGTERM])
def test_the_end_of_a_chat(model, answers, ranks, end):
    with Screen(model, ranks, "-m", 4) as screen:
        screen.wait_for("is ready, ranks: .*\n> ")
        screen.type("hello\n")
        (answer,) = answers(["hello"], max_tokens=4)
        shown = screen.wait_for("4 tokens, the first after .*\n> ")
        assert shown.startswith(f"hello\n{answer}\n"), (shown, answer)
        screen.process.send_signal(end) if isinstance(end, int) else screen.type(end)
        assert screen.process.wait(30) == 0


def test_ctrl_c_when_an_answer_has_just_ended():
    """Its event loop is closed before the thread of the chat says that there is no answer."""
    terminal = Terminal(None, ChatOptions("models/tiny"))

    async def answer():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        terminal._stop_answer = lambda: loop.call_soon_threadsafe(task.cancel)

    asyncio.run(answer())
    terminal.interrupt()
