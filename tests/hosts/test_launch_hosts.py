"""`mlxdist launch --hostfile`: an agent on each host, which ssh has started, and nothing left anywhere."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from launching import LAUNCH, RANK, nothing_left  # noqa: F401  (nothing_left is a fixture of every test)
from ssh_hosts import SshHosts, ssh_hosts
from waiting import wait_for

from mlxdist.cluster.ssh.protocol import GREETING, MAX_PAYLOAD, FrameError, Frames, Kind, pack, pack_json, unpack_json
from mlxdist.launch.job_frames import JobFrame
from mlxdist.launch.jobs import find_job, list_jobs
from mlxdist.launch.stale_jobs import remove_stale_jobs

HERE = [*LAUNCH, "--hosts", "localhost"]
AWKWARD = ["two words", "it's", '"', "$HOME", "`id`", "a\nb", "ü", "", "--", "*"]


def launch(command, *arguments, timeout=60, **keywords):
    keywords = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True} | keywords
    return subprocess.run([*command, *arguments], timeout=timeout, **keywords)


def python(command, program, *arguments, **keywords):
    return launch(command, "--", sys.executable, "-c", RANK + program, *arguments, **keywords)


def lines(job):
    return sorted(job.stdout.splitlines())


def test_an_agent_on_this_machine():
    job = python([*HERE, "-n", "2"], "import sys; print(rank, sys.argv[1:], os.getcwd())", *AWKWARD)
    assert job.returncode == 0, job.stderr
    assert lines(job) == [f"[{rank} localhost] {rank} {AWKWARD} {os.getcwd()}" for rank in range(2)]


def test_collectives(tmp_path):
    program = "import mlxdist, numpy; print(mlxdist.all_sum(numpy.full(2, 1 + rank)))"
    assert lines(python([*HERE, "-n", "2"], program)) == [f"[{rank} localhost] [3 3]" for rank in range(2)]
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    job = python([*LAUNCH, "--hostfile", str(tmp_path / "hosts")], "print(os.environ['MLXDIST_WORLD_SIZE'])")
    assert lines(job) == [f"[{rank} localhost] 3" for rank in range(3)]


def test_a_host_that_is_repeated():
    """As mlx.launch has it: that many ranks."""
    shown = launch([*LAUNCH, "--hosts", "localhost,localhost,a:2,b", "--dry-run"], "--", "true")
    hosts = ["localhost"] * 2 + ["a"] * 2 + ["b"]
    assert shown.stdout.splitlines()[:5] == [f"[{rank} {host:<9}] true" for rank, host in enumerate(hosts)], (
        shown.stderr
    )
    refused = launch([*LAUNCH, "--hosts", "a,b,a", "--dry-run"], "--", "true")
    assert refused.returncode == 2 and "a is there twice, first in line 1" in refused.stderr


def test_variables(tmp_path):
    """Of the hostfile, of this shell's MLXDIST_*, of --env-file, of --env: each before what comes earlier."""
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": [{"ssh": "localhost"}], "envs": ["A=1", "B=1", "C=1"]}))
    (tmp_path / "env").write_text("# comment\n\nB=2\nC=2\nD=it's $HOME\n")
    options = ["--hostfile", tmp_path / "hosts.json", "--env-file", tmp_path / "env", "--env", "C=3"]
    names = ["A", "B", "C", "D", "MLXDIST_TIMEOUT"]
    job = python(
        [*LAUNCH, *map(str, options)],
        f"print([os.environ.get(name) for name in {names}])",
        env=os.environ | {"MLXDIST_TIMEOUT": "7"},
    )
    assert lines(job) == ["[0 localhost] ['1', '2', '3', \"it's $HOME\", '7']"], job.stderr


def test_directory(tmp_path):
    job = python([*HERE, "--cwd", str(tmp_path)], "print(os.getcwd())")
    assert lines(job) == [f"[0 localhost] {tmp_path}"]
    job = python([*HERE, "--cwd", "/no/such"], "")
    assert job.returncode == 1 and "localhost: the directory /no/such cannot be entered: No such file" in job.stderr


@pytest.mark.parametrize("choice", ["all", "0"])
def test_input_reaches_the_ranks_that_are_to_have_it(choice):
    text = "".join(f"line {i}\n" for i in range(50_000))  # more than pipes hold
    program = "import sys; print(len(sys.stdin.read()))"
    job = python([*HERE, "-n", "2", "--stdin", choice], program, stdin=None, input=text)
    assert lines(job) == [f"[0 localhost] {len(text)}", f"[1 localhost] {len(text) if choice == 'all' else 0}"]


def test_a_rank_that_does_not_read_its_input_delays_no_other():
    text = "".join(f"line {i}\n" for i in range(50_000))
    program = "import sys\nif rank == 0: sys.stdin.readline(); sys.stdin.close()\n"
    program += "elif rank == 1: print(len(sys.stdin.read()))\nelse: late(0.5)\nprint('done')"
    job = python([*HERE, "-n", "3"], program, stdin=None, input=text)
    assert job.returncode == 0, job.stderr
    done = [f"[{rank} localhost] done" for rank in range(3)]
    assert lines(job) == sorted([f"[1 localhost] {len(text)}", *done])


def test_streams_stay_apart_and_whole():
    program = "import sys; print('x' * 60_000); print('error', file=sys.stderr)"
    job = python([*HERE, "-n", "2"], program)
    assert lines(job) == [f"[{rank} localhost] {'x' * 60_000}" for rank in range(2)]
    assert sorted(job.stderr.splitlines()) == [f"[{rank} localhost] error" for rank in range(2)]


@pytest.mark.parametrize(
    "ending, status, words",
    [
        ("sys.exit(3)", 3, "rank 1 failed first, with exit status 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed first, killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_others(ending, status, words):
    program = f"import sys\nif rank == 1:\n    {ending}\nstay()"
    job = python([*HERE, "-n", "3", "--grace-period", "0.5"], program)
    assert job.returncode == status and words in job.stderr and "ranks 0 and 2 ended after SIGTERM" in job.stderr


def test_a_rank_that_cannot_be_started(tmp_path):
    program = tmp_path / "program"
    program.write_text("no program at all\n")
    program.chmod(0o755)
    job = launch([*HERE, "-n", "2"], "--", str(program))
    assert job.returncode == 126 and "localhost: cannot start rank 0: [Errno 8] Exec format error" in job.stderr


def test_the_rank_that_failed_first_is_named():
    """By the ranks themselves, where both end within milliseconds."""
    program = "import mlxdist; g = mlxdist.init(); mlxdist.barrier()\nif rank == 1: os._exit(5)\nmlxdist.barrier()"
    job = python([*HERE, "-n", "2"], program)
    assert job.returncode == 5 and "rank 1 failed first, with exit status 5" in job.stderr


def test_restarts():
    program = "print(os.environ['MLXDIST_RESTART_COUNT'])\nraise SystemExit(os.environ['MLXDIST_RESTART_COUNT'] == '0')"
    job = python([*HERE, "-n", "2", "--max-restarts", "2"], program)
    assert job.returncode == 0 and lines(job) == sorted(f"[{r} localhost] {n}" for r in range(2) for n in range(2))


@pytest.mark.parametrize(
    "options, status, words",
    [
        (["--hosts", "localhost", "--python", "/no/python"], 1, "/no/python"),
        (["--hosts", "localhost", "--", "no-such-command"], 127, "localhost: The command 'no-such-command' does not"),
        (["--hosts", "localhost", "--hostfile", "x"], 2, "Give --hostfile or --hosts, not both."),
        (["--hosts", "a,-oProxy"], 2, "is no name or address of a host"),
        (["--hosts", "a,b", "--include", "c"], 2, "--include: c is none of the hosts a, b."),
        (["--hosts", "a,b", "--exclude", "a,b"], 2, "No host is left to run on."),
        (["--include", "a", "-n", "1"], 2, "give --hostfile or --hosts"),
        ([], 2, "Missing option '-n', or '--hostfile', or '--hosts'."),
        (["--hostfile", "/no/file"], 2, "hostfile '/no/file': No such file"),
        (["--hosts", "localhost", "--ssh", '"'], 2, "--ssh '\"': No closing quotation"),
        (["--hosts", "localhost", "--env", "MLXDIST_RANK=1"], 2, "MLXDIST_RANK is set by the launcher"),
    ],
)
def test_rejected_before_anything_is_started(options, status, words):
    job = launch(LAUNCH, *options, *([] if "--" in options else ["--", "true"]))
    assert job.returncode == status and words in job.stderr, job.stderr


def test_dry_run_shows_what_would_be_started(tmp_path):
    rows = [{"ssh": "a", "rdma": [None, "en1", "en2"]}, {"ssh": "b", "rdma": ["en1", None, "en3"]}]
    rows += [{"ssh": "c", "rdma": ["en2", "en3", None]}]
    (tmp_path / "hosts.json").write_text(json.dumps(rows))
    options = ["--hostfile", str(tmp_path / "hosts.json"), "--exclude", "b", "-n", "2", "--dry-run"]
    job = launch(LAUNCH, *options, "--", "python", "a b.py")
    shown = job.stdout.splitlines()
    assert shown[:4] == [f"[{rank} {host}] python 'a b.py'" for rank, host in enumerate("aacc")]
    assert shown[4].startswith("a: ssh -o BatchMode=yes ") and shown[4].endswith("-m mlxdist rpc-server'")
    assert shown[6] == 'MLXDIST_DEVICE_MAP=[[null, ["en2"]], [["en2"], null]]'


@pytest.mark.parametrize("options, ranks", [([], 16), (["--gpus", "4"], 16), (["--hosts", "a,b", "-n", "3"], 6)])
def test_mlx_hostfile_names_the_hosts(tmp_path, monkeypatch, options, ranks):
    (tmp_path / "hosts").write_text("".join(f"node{number}:4\n" for number in range(4)))
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    job = launch(LAUNCH, *options, "--dry-run", "train.py")
    shown = [line for line in job.stdout.splitlines() if line.startswith("[")]
    assert job.returncode == 0 and len(shown) == ranks, job.stderr
    assert (f"hosts of {tmp_path}/hosts (MLX_HOSTFILE)" in job.stderr) == ("--hosts" not in options)


def test_mlx_hostfile_of_a_rank_is_not_the_user_s(monkeypatch):
    monkeypatch.setenv("MLX_HOSTFILE", "/no/file")
    monkeypatch.setenv("MLX_RANK", "0")
    job = launch(LAUNCH, "-n", "2", "--dry-run", "train.py")
    assert (job.returncode, job.stderr, len(job.stdout.splitlines())) == (0, "", 2)


@pytest.mark.parametrize("options", [["--gpus", "2"], ["-n", "8"]])
def test_ranks_that_contradict_the_slots(tmp_path, options):
    (tmp_path / "hosts").write_text("a:4\nb:4\n")
    job = launch(LAUNCH, "--hostfile", str(tmp_path / "hosts"), *options, "--dry-run", "train.py")
    assert (job.returncode, job.stdout) == (2, "") and "gives a 4 slots; leave -n out" in job.stderr


def test_ctrl_c_while_a_host_does_not_respond(tmp_path):
    silent = tmp_path / "silent"
    silent.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 60\n")
    silent.chmod(0o755)
    command = [*HERE, "--python", str(silent), "--", "true"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert wait_for((tmp_path / "asked").exists)
        launcher.send_signal(signal.SIGINT)
        _, error = launcher.communicate(timeout=45)
        assert launcher.returncode == 130 and "interrupted by SIGINT before all hosts were ready" in error


def test_two_names_of_one_machine():
    job = launch(LAUNCH, "--hosts", "localhost,127.0.0.1", "--", "true")
    assert job.returncode == 1
    assert "localhost and 127.0.0.1 are the same machine; name it once, with as many slots" in job.stderr


def test_frames():
    """Whatever pieces they come in; and nothing that is no frame is waited for, or kept."""
    sent = [(JobFrame.OUT, 3, b"x" * 1000), (JobFrame.ERR, 1023, b""), (JobFrame.OUT, 0, b"\0\n")]
    data = b"".join(pack(*frame) for frame in sent)
    for step in (1, 7, len(data)):
        frames = Frames()
        found = [frame for at in range(0, len(data), step) for frame in frames.feed(data[at : at + step])]
        assert found == sent
    assert unpack_json(next(Frames().feed(pack_json(Kind.HELLO, {"a": 1})))[2]) == {"a": 1}
    for wrong in (
        b"\xff" * 7,
        b"hello, I am no frame",
        bytes([JobFrame.OUT, 0, 0]) + (MAX_PAYLOAD + 1).to_bytes(4, "big"),
    ):
        with pytest.raises(FrameError):
            list(Frames().feed(wrong))
    for wrong in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(FrameError):
            unpack_json(wrong)


def test_an_agent_that_is_none(tmp_path):
    """What talks in its place is not understood, and that is said; what a shell prints before it greets is skipped."""
    noisy = tmp_path / "noisy"
    noisy.write_text(f'#!/bin/sh\necho welcome; echo\nexec {sys.executable} "$@"\n')
    noisy.chmod(0o755)
    assert python([*HERE, "--python", str(noisy)], "print(rank)").returncode == 0
    for name, prints in (("stranger", "hello"), ("liar", GREETING.decode() + " hello, I am no frame")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nprintf '%s' '{prints}'\n")
        program.chmod(0o755)
        job = python([*HERE, "--python", str(program)], "")
        assert job.returncode == 1 and "localhost" in job.stderr and "hello" in job.stderr, job.stderr


# Over ssh, between two network namespaces.


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as both:
        yield both


def over_ssh(nodes: SshHosts, *options: str, launcher=LAUNCH) -> list[str]:
    return nodes.command(*launcher, "--hosts", ",".join(nodes.names), "--ssh", nodes.ssh, *options)


def launcher_with(silence: int) -> list[str]:
    """A launcher whose agents end their ranks when they receive nothing from it for N seconds, at least 5."""
    program = (
        f"from mlxdist import cli; from mlxdist.launch import hosts; hosts.AGENT_SECONDS = {silence - 5}; cli.main()"
    )
    return [sys.executable, "-c", program, "launch", "--control-grace", "5"]


@pytest.mark.long
@pytest.mark.parametrize("number, seconds", [(signal.SIGSTOP, 30), (signal.SIGCONT, 8)])
def test_agents_end_their_ranks_when_they_receive_nothing_from_the_launcher(number, seconds):
    """One that is stopped (Ctrl-Z), as one without power; while it lives, ranks that say nothing run on."""
    program = RANK + "print('runs', flush=True); stay()"
    command = [*launcher_with(5), "--hosts", "localhost", "--", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline()
        (job,) = list_jobs()
        launcher.send_signal(number)
        have_ended = wait_for(lambda: not find_job(job.name).pids, seconds)
        launcher.send_signal(signal.SIGCONT)
        launcher.send_signal(signal.SIGTERM)
        _, error = launcher.communicate(timeout=20)
        assert have_ended is (number == signal.SIGSTOP)
        assert ("nothing arrived from the launcher for 5 s" in error) is (number == signal.SIGSTOP), error


@pytest.mark.long
def test_two_hosts(nodes):
    """Ranks on both, which find each other by the address that ssh has used; nothing secret on a command line."""
    program = "import mlxdist, numpy, sys, time\nprint(rank, mlxdist.all_sum(numpy.ones(2)), sys.argv[1:])"
    job = python(over_ssh(nodes, "-n", "2", "--env", "A=it's $HOME"), program + "; print(os.environ['A'])", *AWKWARD)
    assert job.returncode == 0, job.stderr
    expected = [f"[{rank} node{rank // 2}] {rank} [4. 4.] {AWKWARD}" for rank in range(4)]
    expected += [f"[{rank} node{rank // 2}] it's $HOME" for rank in range(4)]
    assert lines(job) == sorted(expected)


@pytest.mark.long
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_of_another_host_that_ends_before_it_has_come(nodes, gone):
    program = f"import mlxdist\nif rank == {gone}: os._exit(0)\nmlxdist.init()"
    job = python(over_ssh(nodes, "--grace-period", "20"), program, timeout=40)
    assert job.returncode == 1
    assert f"RendezvousError: rendezvous: rank {gone} has ended with exit status 0 before" in job.stderr, job.stderr


@pytest.mark.long
def test_the_first_rank_is_on_the_first_host_of_the_hostfile(nodes):
    """Addresses of the hostfile; the launcher's own host last; input for rank 0 over there."""
    file = nodes.directory / "hosts.json"
    entries = [{"ssh": name, "ips": [host.address]} for name, host in zip(nodes.names, nodes.hosts)]
    file.write_text(json.dumps(entries[::-1]))
    program = "import mlxdist, sys\nmlxdist.init(); mlxdist.barrier()\n"
    program += "print(sys.stdin.read(), os.environ['MLXDIST_RENDEZVOUS'])"
    command = nodes.command(*LAUNCH, "--hostfile", file, "--ssh", nodes.ssh)
    job = python(command, program, stdin=None, input="hello")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(f" {nodes.hosts[1].address}:") == 2 and "[0 node1] hello" in job.stdout


def of_all_processes(file: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):  # it has ended, or is not readable
            found.append(path.read_bytes())
    return found


@pytest.mark.long
def test_a_secret_is_on_no_command_line(nodes):
    marker = uuid.uuid4().hex
    program = RANK + "print('runs', flush=True); stay()"
    with subprocess.Popen(
        [*over_ssh(nodes, "--env", f"MARKER={marker}"), "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert [launcher.stdout.readline() for _ in range(2)] and len(nodes.processes(marker)) >= 2
        commands, variables = of_all_processes("cmdline"), b"\0".join(of_all_processes("environ")).split(b"\0")
        secrets = {variable.partition(b"=")[2] for variable in variables if variable.startswith(b"MLXDIST_SECRET=")}
        assert secrets and not any(secret in command for secret in secrets for command in commands)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(20) == 143
    assert wait_for(lambda: not nodes.processes(marker), 10), nodes.processes(marker)


def _kill_launcher(nodes, launcher):
    launcher.kill()


def _kill_connection(nodes, launcher):
    for path in Path("/proc").glob("[0-9]*"):
        words = (path / "cmdline").read_bytes().split(b"\0") if (path / "cmdline").exists() else []
        if words[:1] == [b"ssh"] and b"node1" in words:
            os.kill(int(path.name), signal.SIGKILL)


def _pull_cable(nodes, launcher):
    nodes.hosts[1].pull_cable()


@pytest.mark.long
@pytest.mark.parametrize(
    "accident, status, words",
    [
        (_kill_launcher, -9, ""),
        (_kill_connection, 255, "the connection to node1 was lost"),
        (_pull_cable, 255, "the connection to node1 was lost"),
    ],
)
def test_nothing_is_left_on_any_host(nodes, accident, status, words):
    marker = uuid.uuid4().hex
    program = RANK + "import subprocess; subprocess.Popen(['sleep', '300']); print('runs', flush=True); stay()"
    options = ["--env", f"MARKER={marker}", "--grace-period", "1"]
    with subprocess.Popen(
        [*over_ssh(nodes, *options, launcher=launcher_with(silence=6)), "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert {launcher.stdout.readline() for _ in range(2)} == {"[0 node0] runs\n", "[1 node1] runs\n"}
        accident(nodes, launcher)
        try:
            _, error = launcher.communicate(timeout=60)
            # Also on a host that no other host reaches any more.
            assert wait_for(lambda: not nodes.processes(marker), 15), nodes.processes(marker)
        finally:
            nodes.hosts[1].plug_cable()
        assert launcher.returncode == status and words in error, error
    remove_stale_jobs()  # as the next launcher does: a launcher that is killed leaves what it has noted of its hosts


@pytest.mark.long
def test_a_rank_that_fails_over_there(nodes):
    program = "import mlxdist\nmlxdist.init(); mlxdist.barrier()\nif rank == 1: os._exit(7)\nmlxdist.barrier()"
    job = python(over_ssh(nodes), program)
    assert job.returncode == 7 and "rank 1 failed first, with exit status 7" in job.stderr
    assert "[0 node0]" in job.stderr and "PeerLost" in job.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "options, words",
    [
        (["--python", "/no/python"], "node0 does not respond: "),
        (["--python", "/usr/bin/python3"], "install mlxdist for that Python, or name another with --python"),
        (["--hosts", "node0,nowhere"], "nowhere does not respond: ssh: Could not resolve hostname nowhere"),
    ],
)
def test_hosts_that_cannot_run_it(nodes, options, words):
    job = launch(over_ssh(nodes, *options), "--", "true")
    assert job.returncode == 1 and words in job.stderr, job.stderr


@pytest.mark.long
def test_mlx_s_ring_between_hosts(nodes, tmp_path):
    """At ports that each host has found free, and addresses that the hostfile gives."""
    entries = [{"ssh": name, "ips": [host.address], "slots": 2} for name, host in zip(nodes.names, nodes.hosts)]
    (tmp_path / "hosts.json").write_text(json.dumps({"backend": "ring", "hosts": entries}))
    command = nodes.command(*LAUNCH, "--hostfile", tmp_path / "hosts.json", "--ssh", nodes.ssh)
    program = "import mlx.core as mx; print(mx.distributed.init(strict=True).size(), mx.distributed.all_sum(1).item())"
    job = python(command, program)
    assert lines(job) == [f"[{rank} node{rank // 2}] 4 4" for rank in range(4)], job.stderr


@pytest.mark.long
def test_mpirun_reaches_hosts_by_the_same_ssh(nodes):
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on the path (Debian: apt install openmpi-bin)")
    environ = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    network = nodes.hosts[0].address.rpartition(".")[0] + ".0/24"
    words = f"--mca oob_tcp_if_include {network} --mca btl_tcp_if_include {network}"
    options = ["--backend", "mpi", "--mpi-arg", words]
    program = "import mlx.core as mx; assert mx.distributed.init(strict=True, backend='mpi').size() == 2"
    program += "; assert mx.distributed.all_sum(1).item() == 2; print('rank', mx.distributed.init().rank())"
    job = launch(over_ssh(nodes, *options), "--", sys.executable, "-c", program, env=environ)
    assert job.returncode == 0, job.stdout + job.stderr
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if re.search(r"\(Open MPI\) [1-4]\.", version):
        assert lines(job) == [f"[mpi] [1,{rank}]<stdout>:rank {rank}" for rank in range(2)]
