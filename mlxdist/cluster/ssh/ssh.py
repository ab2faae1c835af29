"""Access to a host: by ssh, without a password; or directly, where the host is this machine."""

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

# ssh prompts for no password, and fails when a host does not respond within 10 s, before there is a connection.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10")
_ALIVE_SECONDS = 5  # between two questions of ssh whether the host is there
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
        silence: seconds without an answer after which ssh gives up a connection, a multiple of 5 at least.
    """

    ssh: Sequence[str] = ("ssh",)
    python: str = ""
    silence: float = 15.0

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """The command that runs ``words`` on the host. A shell on another host gets these words alone, quoted."""
        if is_this_machine(name):
            return list(words)
        unanswered = max(1, round(self.silence / _ALIVE_SECONDS))
        alive = (f"ServerAliveInterval={_ALIVE_SECONDS}", f"ServerAliveCountMax={unanswered}")
        options = [word for option in (*_OPTIONS, *alive) for word in ("-o", option)]
        return [*self.ssh, *options, "-T", name, f"exec {shlex.join(words)}"]

    def server(self, name: str) -> list[str]:
        """The command that starts the RPC server on the host. Its input comes over the connection."""
        return self.command(name, module_command("mlxdist", "rpc-server", python=self.python))


@dataclass(frozen=True)
class CommandResult:
    """Output and exit status of a command on a host. Status 255: no connection; 124: it exceeded the time limit."""

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

    ``running``: a list that gets the process, so that another thread can end it.
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
    """Runs a command on several hosts at once. Returns results in the order of hosts. Ctrl-C ends it everywhere."""
    running: list[subprocess.Popen] = []
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        run_on = functools.partial(
            run, words=words, ssh_config=ssh_config, input=input, seconds=seconds, running=running
        )
        results = [threads.submit(run_on, name) for name in names]
        try:
            return [result.result() for result in results]
        except BaseException:
            # Repeated, because a thread may start its process only after the others were ended.
            while wait(results, _MOMENT).not_done:
                while running:
                    _terminate(running.pop())
            raise


def _terminate(process: subprocess.Popen) -> None:
    """Ends a process and its children, which hold its pipes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def cannot_run(name: str, error: OSError) -> str:
    """The error for a module of mlxdist that did not start, because the command that leads to the host is missing."""
    option = "--python" if is_this_machine(name) else "--ssh"
    return f"{name}: the command {error.filename!r} cannot be run: {error.strerror}; see {option}"


def why_lost(name: str, responded: bool, words: str) -> str:
    """The error for a lost connection. ``responded``: whether the module had started; ``words``: its last output."""
    if responded:
        return f"the connection to {name} was lost{f': {words}' if words else ''}"
    return f"{name} does not respond: {words or 'ssh ended without a word'}{agent_advice(name, words)}"


def agent_advice(name: str, words: str) -> str:
    """Advice for a module of mlxdist that does not start on a host. ``words``: the last line of its output."""
    if "No module named" in words:
        return "; install mlxdist for that Python, or name another with --python"
    if "`python -h'" in words:  # it does not know -P
        return "; that Python is older than 3.11: name another with --python"
    if "not found" in words or "No such file" in words:
        return "; that Python is not there: name another with --python"
    if is_this_machine(name):
        return ""
    return local_network.hint(words) or f"; try: ssh -o BatchMode=yes {shlex.quote(name)} true"
