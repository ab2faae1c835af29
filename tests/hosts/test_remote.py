"""Other hosts are asked over one connection each: what comes back, what goes wrong, and that nothing is left there."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys

import pytest
from fake_ssh import fake_ssh, through_a_shell
from launching import marked_processes, nothing_left  # noqa: F401  (nothing_left is a fixture of every test)
from waiting import wait_for

from mlxdist.cluster.ssh.protocol import GREETING, Kind, pack
from mlxdist.cluster.ssh.rpc_client import CallError, Connections
from mlxdist.cluster.ssh.ssh import LOST, SshConfig, run, run_everywhere
from mlxdist.version import __version__

AWKWARD = ["two words", "it's", '"', "$HOME", "`id`", "a\nb", "ü", "", "--", "*"]


def test_this_machine_is_probed_without_ssh():
    with Connections(["localhost", "127.0.0.1"], SshConfig(("/no/such/ssh",))) as connections:
        responses = connections.call("who")
    assert [response["mlxdist"] for response in responses] == [__version__] * 2
    assert responses[0]["host"] == socket.gethostname()


def test_shells_may_print_before_the_response(tmp_path):
    with Connections(["a", "b"], through_a_shell(tmp_path, "Welcome!\n{}")) as connections:
        for _ in range(3):  # one connection, many calls
            assert [response["python"] for response in connections.call("who")] == [platform.python_version()] * 2


def test_words_survive_the_shell_of_the_other_host(tmp_path):
    words = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.argv[1:]))", *AWKWARD]
    response = run("a", words, through_a_shell(tmp_path))
    assert json.loads(response.output) == AWKWARD and response.status == 0


def greeted(kind: int, payload: bytes) -> str:
    """The program of a server that sends this, whatever is called."""
    frame = pack(kind, 0, payload)
    return f"import os; os.write(1, {GREETING!r}); os.read(0, 1); os.write(1, {frame!r}); sys.stdin.read()"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sys.exit('Permission denied (publickey).')", "a does not respond: Permission denied (publickey).; try: ssh"),
        ("sys.exit('bash: /x/python: No such file or directory')", "name another with --python"),
        ("sys.exit('/x/python: No module named mlxdist')", "install mlxdist for that Python"),
        ("print('x' * 100_000)", "more than 65536 bytes without a greeting"),
        ("print('\\nmlxdist protocol 99')", "it has protocol 99, and this machine 1; install the same version"),
        (f"print({GREETING.decode()!r}, end=''); print('hello, world')", "what a sends is not understood"),
        (greeted(Kind.RESULT, b"{]"), "what a sends is not understood: no JSON"),
        (greeted(Kind.RESULT, b"[1]"), "what a sends is not understood: no object"),
        (greeted(Kind.RESULT, b"{}"), "what a sends is not understood: no response"),
        (greeted(16, b"{}"), "what a sends is not understood: no response"),
        (
            f"print({GREETING.decode()!r}, end=''); sys.exit('cable pulled')",
            "the connection to a was lost: cable pulled",
        ),
    ],
)
def test_problems_are_reported_for_each_host(tmp_path, program, words):
    with Connections(["a", "localhost"], fake_ssh(tmp_path, program)) as connections:
        failed, fine = connections.call("who")
    assert isinstance(failed, CallError) and not failed.connected and words in str(failed), failed
    assert fine["mlxdist"] == __version__


def test_ctrl_c_ends_what_runs_everywhere(tmp_path):
    """`config --install`, whose pip may need half an hour on each host."""
    ssh = fake_ssh(tmp_path, "print('here', file=open(sys.argv[-2] + '.here', 'w'))\nsubprocess.run(['sleep', '50'])")
    command = [sys.executable, "-m", "mlxdist", "config", "--ssh", *ssh.ssh, "--hosts", "a,b", "--install"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert wait_for(lambda: all((tmp_path / f"{name}.here").exists() for name in "ab"))
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1 and b"Aborted" in said and b"Traceback" not in said, said


def test_a_mac_that_may_not_use_the_local_network(tmp_path, monkeypatch):
    ssh = fake_ssh(tmp_path, "sys.exit('ssh: connect to host a port 22: No route to host')")
    with Connections(["a"], ssh) as connections:
        assert "Local Network" not in str(connections.call("who")[0])
    monkeypatch.setattr(sys, "platform", "darwin")
    with Connections(["a"], ssh) as connections:
        assert "System Settings > Privacy & Security > Local Network" in str(connections.call("who")[0])


def test_only_what_is_listed_can_be_called():
    with Connections(["localhost"]) as connections:
        (error,) = connections.call("os:system", {"command": "true"})
        assert isinstance(error, CallError) and error.connected and "there is no call 'os:system'" in str(error)
        (error,) = connections.call("who", {"unknown": 1})
        assert "unexpected keyword argument" in str(error)
        assert connections.call("who")[0]["mlxdist"] == __version__  # the connection is none the worse


def test_a_host_that_does_not_respond_in_time_leaves_no_process(tmp_path):
    marker = os.environ["TEST_MARKER"]
    program = f"import time; print({GREETING.decode()!r}, end='', flush=True); time.sleep(60)"
    with Connections(["a"], fake_ssh(tmp_path, program)) as connections:
        (error,) = connections.call("who", seconds=0.3)  # the process would stay for a minute
        assert "a does not respond to who within 0.3 s" in str(error)
    assert wait_for(lambda: not marked_processes(marker)), marked_processes(marker)


def test_no_ssh():
    responses = run_everywhere(["a", "localhost"], ["true"], SshConfig(("/no/such/ssh",)))
    assert [(response.name, response.status) for response in responses] == [("a", 127), ("localhost", 0)]
    assert "/no/such/ssh: No such file" in responses[0].errors
    with Connections(["a"], SshConfig(("/no/such/ssh",))) as connections:
        assert "the command '/no/such/ssh' cannot be run: No such file" in str(connections.call("who")[0])


def test_a_command_that_takes_too_long():
    response = run("localhost", ["sleep", "30"], seconds=0.2)
    assert response.status == 124 and response.last_words == "no response within 0.2 s"
    assert LOST == 255
