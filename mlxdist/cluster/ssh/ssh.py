"""How a host is reached: by ssh, without a password; or directly, where it is this machine."""

import functools
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from mlxdist.base import local_network
from mlxdist.base.child_process import module_command

from .this_machine import is_this_machine

__all__ = [
    "LOST",
    "TOO_LATE",
    "CommandResult",
    "SshConfig",
    "agent_advice",
    "cannot_run",
    "is_this_machine",
    "run",
    "run_everywhere",
    "why_lost",
]

# ssh asks for no password, and notices a host that does not respond: within 10 s before there is a connection,
# 15 s afterwards.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
# The exit status of ssh when the connection fails.
LOST = 255
TOO_LATE = 124  # as of timeout(1)
_MOMENT = 0.05


@dataclass(frozen=True)
class SshConfig:
    """The way to other hosts, as the user's options give it.

    Attributes:
        ssh: the words of the command that leads there.
        python: a Python there that has mlxdist; empty for the path of the one that runs this.
    """

    ssh: Sequence[str] = ("ssh",)
    python: str = ""

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """Runs ``words`` on the host; on another one its shell sees them, quoted, and nothing else."""
        if is_this_machine(name):
            return list(words)
        options = [word for option in _OPTIONS for word in ("-o", option)]
        return [*self.ssh, *options, "-T", name, f"exec {shlex.join(words)}"]

    def server(self, name: str) -> list[str]:
        """Starts the server of calls on the host, a command of mlxdist. What it is given comes over the connection."""
        return self.command(name, module_command("mlxdist", "rpc-server", python=self.python))


@dataclass(frozen=True)
class CommandResult:
    """What a command on a host has printed, and its exit status: 255 if there was no connection, 124 if it was late."""

    name: str
    status: int
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        return next((line.strip() for line in reversed(self.errors.splitlines()) if line.strip()), "")

    @property
    def failure(self) -> str:
        return self.last_words or f"exit status {self.status}"


def run(
    name: str,
    words: Sequence[str],
    ssh_config: SshConfig = SshConfig(),
    *,
    input: str | bytes = b"",
    seconds: float = 30.0,
    running: list[subprocess.Popen] | None = None,
) -> CommandResult:
    """Runs a command on a host and waits for it. Never raises: what went wrong is in the result.

    ``running``: gets the process, which another thread may end.
    """
    pipe = subprocess.PIPE
    command = ssh_config.command(name, words)
    try:  # in a session of its own: Ctrl-C is the caller's
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        return CommandResult(
            name, 127, "", f"{words[0] if is_this_machine(name) else ssh_config.ssh[0]}: {error.strerror}"
        )
    if running is not None:
        running.append(process)
    with process:
        try:
            data = process.communicate(input.encode() if isinstance(input, str) else input, seconds)
        except subprocess.TimeoutExpired as late:
            process.kill()
            out, err = ((data or b"").decode(errors="replace") for data in (late.stdout, late.stderr))
            return CommandResult(name, TOO_LATE, out, f"{err}\nno response within {seconds:g} s")
        except BaseException:
            process.kill()
            raise
    return CommandResult(name, process.returncode, *(text.decode(errors="replace") for text in data))


def run_everywhere(
    names: Sequence[str],
    words: Sequence[str],
    ssh_config: SshConfig = SshConfig(),
    *,
    input: str | bytes = b"",
    seconds: float = 30.0,
) -> list[CommandResult]:
    """The same on several hosts at once, in their order. Ctrl-C ends it everywhere."""
    running: list[subprocess.Popen] = []
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        run_on = functools.partial(
            run, words=words, ssh_config=ssh_config, input=input, seconds=seconds, running=running
        )
        results = [threads.submit(run_on, name) for name in names]
        try:
            return [result.result() for result in results]
        except BaseException:
            while wait(results, _MOMENT).not_done:
                while running:
                    _terminate(running.pop())
            raise


def _terminate(process: subprocess.Popen) -> None:
    """With its children, which hold its pipes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def cannot_run(name: str, error: OSError) -> str:
    """A module of mlxdist could not be started on a host, for want of the command that leads there."""
    option = "--python" if is_this_machine(name) else "--ssh"
    return f"{name}: the command {error.filename!r} cannot be run: {error.strerror}; see {option}"


def why_lost(name: str, responded: bool, words: str) -> str:
    """The end of a connection to a module of mlxdist. ``responded``: it had started; ``words``: what was said last."""
    if responded:
        return f"the connection to {name} was lost{f': {words}' if words else ''}"
    return f"{name} does not respond: {words or 'ssh ended without a word'}{agent_advice(name, words)}"


def agent_advice(name: str, words: str) -> str:
    """What to do when a module of mlxdist does not start on a host. ``words``: what was said last."""
    if "No module named" in words:
        return "; install mlxdist for that Python, or name another with --python"
    if "`python -h'" in words:  # it does not know -P
        return "; that Python is older than 3.11: name another with --python"
    if "not found" in words or "No such file" in words:
        return "; that Python is not there: name another with --python"
    if is_this_machine(name):
        return ""
    return local_network.hint(words) or f"; try: ssh -o BatchMode=yes {shlex.quote(name)} true"
