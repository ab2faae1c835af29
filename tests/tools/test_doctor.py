"""`mlxdist doctor`: the command on this machine, hosts that do not respond as they should, and what is shown."""

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_facts import NAMES, VERSIONS, cluster, facts
from fake_ssh import fake_ssh, through_a_shell
from launching import nothing_left  # noqa: F401  (a fixture of every test)
from rich.console import Console

from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.hostfile.writing import write
from mlxdist.cluster.ssh import rpc_client
from mlxdist.cluster.ssh.protocol import GREETING, Kind, pack_json
from mlxdist.tools.doctor import report
from mlxdist.tools.doctor.checks import CHECKS, run_checks
from mlxdist.tools.doctor.cluster import CheckOptions, Cluster, Job
from mlxdist.tools.doctor.diagnose import failed_hosts, preflight, without_hosts
from mlxdist.tools.doctor.findings import Finding, Result, Verdict, fail, ok, way
from mlxdist.tools.doctor.probe import probe

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "mlxdist", "doctor"]


def test_which_hosts_have_failed():
    def failed(*findings: Finding) -> list[str]:
        return failed_hosts(["a", "b", "c", "d"], [Result("any", findings)])

    def apart(*hosts: str) -> Finding:
        return way(fail(hosts, "x", "y"))

    assert failed(ok("a", "")) == failed(fail((), "x", "y")) == []
    assert failed(fail(("c", "b"), "x", "y")) == ["b", "c"]
    assert failed(apart("a", "b"), apart("b", "a")) == ["b"]
    star = [apart(name, "a") for name in "bcd"]
    assert failed(*star) == ["a"] and failed(*star, fail("b", "x", "y")) == ["a", "b"]
    assert failed(apart("a", "b"), fail("a", "x", "y")) == ["a"]


def test_hostfile_without_a_host():
    rows = [[None, "en1", "en2"], ["en1", None, "en3"], ["en2", "en3", None]]
    text = json.dumps({"envs": ["A=1"], "hosts": [{"ssh": n, "rdma": row} for n, row in zip(NAMES, rows)]})
    left = without_hosts(parse(text), ["b"])
    assert [host.name for host in left.hosts] == ["a", "c"] and left.envs == ("A=1",)
    assert [host.rdma for host in left.hosts] == [((), ("en2",)), (("en2",), ())]
    left = without_hosts(parse("a slots=2\nb slots=2\n"), ["a"])
    assert write(left, left.format) == "b slots=2\n"


def test_a_current_directory_that_does_not_exist(tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"rmdir ../gone; exec {shlex.join(DOCTOR)} --quick"
    job = subprocess.run(line, shell=True, cwd=tmp_path / "gone", capture_output=True, text=True)
    assert job.returncode == 2 and "The current directory does not exist any more" in job.stderr, job.stderr


def test_the_page_lists_every_check():
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert re.findall(r"^### `([\w-]+)`$", page, re.MULTILINE) == [check.name for check in CHECKS]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_folds(width, monkeypatch):
    names = tuple(f"studio-{number}.local" for number in range(4))
    differing = facts(versions=VERSIONS | {"MLX": "0.32.3"}, variables={"OMP_NUM_THREADS": "1"})
    found = cluster(differing, names=names)
    rates = {(a, b): 9e9 for a in names for b in names if a != b} | {names[:2]: 1e9}
    found.job = Job(names, 4, bandwidth=rates)
    results = run_checks(found, after_job=False) + run_checks(found, after_job=True)
    console = Console(width=width, record=True, force_terminal=True, file=open(os.devnull, "w"))
    monkeypatch.setattr(report, "Console", lambda **_: console)
    report.print_report(found, results)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith(("clocks", "disk ok all 4 at least")) for line in lines)
    assert "MLX is 0.32.3, elsewhere 0.32.4" in " ".join(lines)
    assert re.search(r"0\.32\.4.*\n.*studio-3\.local\s+0\.32\.3", text)  # the table of differences
    assert "1.00 (11%)" in text.replace("\n", " ") or "(11%)" in text


def doctor(*arguments, **keywords) -> subprocess.CompletedProcess:
    words = [*DOCTOR, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL, **keywords)


def of_check(done: subprocess.CompletedProcess, name: str) -> list[dict]:
    return next(check["findings"] for check in json.loads(done.stdout)["checks"] if check["check"] == name)


def test_this_machine(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    done = doctor("--quick", "--json", "--", sys.executable, script)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["check"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}
    assert list(found) == [check.name for check in CHECKS if not check.thorough]
    for name in ("reachable", "python", "versions", "script", "allocation", "correctness", "provider"):
        assert found[name] == "ok", name


@pytest.mark.long
def test_what_fails_on_this_machine(tmp_path):
    """And no host runs a job where the script is missing."""
    done = doctor("--quick", "--cwd", tmp_path, "--", "no-such-command", "train.py")
    assert done.returncode == 1 and "no-such-command" in done.stdout
    assert "mlxdist doctor: fail, localhost" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exclude-failed"], "give --hostfile or --hosts, and --output"),
        (["--output", "x"], "--output is where --exclude-failed writes"),
        (["--hostfile", "/no/file"], "hostfile '/no/file': No such file"),
    ],
)
def test_rejected(arguments, words):
    done = doctor(*arguments)
    assert done.returncode == 2 and words in done.stderr


def probed(ssh_config) -> Cluster:
    return probe([Host("a"), Host("localhost")], ssh_config, CheckOptions(quick=True))


def failures(found: Cluster) -> dict[str, tuple[str, ...]]:
    results = run_checks(found, after_job=False)
    return {r.check: f.hosts for r in results for f in r.findings if f.verdict is Verdict.FAIL}


def test_a_host_without_mlxdist(tmp_path):
    found = probed(fake_ssh(tmp_path, "sys.exit('/x/python: No module named mlxdist')"))
    assert failures(found) == {"python": ("a",)} and "localhost" in found.responses["facts"]


@pytest.mark.long
def test_a_host_that_refuses(tmp_path):
    found = probed(fake_ssh(tmp_path, "sys.exit('a: Permission denied (publickey).')"))
    assert failures(found) == {"reachable": ("a",)}


@pytest.mark.long
def test_a_host_with_another_version(tmp_path):
    """Of which nothing else is asked."""
    response = pack_json(Kind.RESULT, {"result": {"host": "a", "python": "3.11.7", "mlxdist": "0.0.9"}})
    program = f"import os; os.write(1, {GREETING!r}); os.read(0, 1); os.write(1, {response!r}); sys.stdin.read()"
    found = probed(fake_ssh(tmp_path, program))
    assert failures(found)["versions"] == ("a",) and list(found.responses["facts"]) == ["localhost"]


@pytest.mark.long
def test_a_silent_host(tmp_path, monkeypatch):
    monkeypatch.setattr(rpc_client, "CONNECT_SECONDS", 3.0)
    found = probed(fake_ssh(tmp_path, "import time; time.sleep(60)"))
    assert "a" in failures(found)["reachable"] and "does not respond" in str(found.errors["who"]["a"])


@pytest.mark.long
def test_two_hosts_connect_to_each_other(tmp_path):
    found = probed(through_a_shell(tmp_path, "Welcome!"))
    assert {(attempt.source, attempt.target): attempt.error for attempt in found.attempts} == {
        ("a", "localhost"): "",
        ("localhost", "a"): "",
    }
    assert "ports" not in failures(found)


@pytest.mark.long
def test_in_a_ring_each_host_reaches_the_next(tmp_path):
    """The addresses of a hostfile for MLX's ring are those by which the host before reaches it."""
    hosts = [Host("a"), Host("localhost", ips=("127.0.0.1",)), Host("b")]
    found = probe(hosts, through_a_shell(tmp_path, ""), CheckOptions(quick=True, backend="ring"))
    assert [(a.source, a.target) for a in sorted(found.attempts, key=lambda attempt: attempt.source)] == [
        ("a", "localhost"),
        ("b", "a"),
        ("localhost", "b"),
    ]


@pytest.mark.long
def test_a_terminal_shows_which_host_is_at_what():
    """And the table goes to the standard output all the same."""
    master, terminal = pty.openpty()
    subprocess.run(["stty", "cols", "100"], stdin=terminal, check=True)
    with subprocess.Popen(
        [*DOCTOR, "--quick"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        shown = b""
        while select.select([master], [], [], 60)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
        os.close(master)
        table = process.communicate(timeout=60)[0]
    for step in (b"versions, memory, disks", b"taking memory", b"values and links"):
        assert step in shown and step.decode() not in table
    assert "mlxdist doctor: " in table and process.returncode == 0


@pytest.mark.long
def test_before_a_launch(tmp_path, capfd):
    assert preflight(HostSelection(), [sys.executable, "-c", "0"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("mlxdist doctor: ") and not any(re.search(r" ok +localhost", line) for line in lines)
    assert preflight(HostSelection(), ["python", str(tmp_path / "missing.py")]) == 1
    assert "missing.py: No such file" in capfd.readouterr().err
