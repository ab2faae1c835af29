"""`mlxdist doctor --report`: what is in the file and what is not; a section that fails or hangs costs no other."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_facts import cluster
from launching import nothing_left  # noqa: F401  (a fixture of every test)
from softverbs_library import LIBRARY, linux
from ssh_hosts import ssh_hosts
from test_doctor_hosts import exporting
from waiting import late

from mlxdist.base.errors import ResourceError
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.runtime.devices.listing import list_apart
from mlxdist.runtime.devices.probe import PeerProbe
from mlxdist.runtime.devices.probe_cache import keep_probes
from mlxdist.tools.doctor import facts
from mlxdist.tools.doctor.diagnose import make_options
from mlxdist.tools.doctor.diagnostics.command import make_report
from mlxdist.tools.doctor.diagnostics.document import MAX_BYTES, Section, fenced, write_document
from mlxdist.tools.doctor.diagnostics.redact import Redactor
from mlxdist.tools.doctor.diagnostics.runs import Run, rdma_runs
from mlxdist.tools.doctor.diagnostics.sections import SECTIONS, Context, Step, _add_run

DOCTOR = [sys.executable, "-m", "mlxdist", "doctor"]
THIS_MACHINE = HostSelection()


def context(**settings) -> Context:
    return Context(THIS_MACHINE, make_options(THIS_MACHINE, (), directory="/", quick=True), **settings)


def steps(*names: str) -> list[Step]:
    return [step for step in SECTIONS if step.name in names]


def data_of(text: str) -> dict:
    """The JSON block at the end of a report."""
    return json.loads(re.search(r"^## For programs\n\n~~~~json\n(.*)\n~~~~\n\Z", text, re.MULTILINE | re.DOTALL)[1])


def make(path: Path, *names: str, status: int = 0, **settings) -> tuple[str, dict]:
    assert make_report(context(**settings), path, steps(*names)) == status
    text = path.read_text()
    return text, data_of(text)["sections"]


def test_this_machine(tmp_path):
    text, found = make(tmp_path / "report.md", "checks", "devices", "system", "soft")
    assert [found[name]["error"] for name in ("checks", "devices", "soft")] == ["", "", ""], found
    checks = {check["check"]: check["verdict"] for check in found["checks"]["data"]["checks"]}
    assert checks["versions"] == checks["correctness"] == "ok"
    (run,) = found["soft"]["data"]["runs"]
    assert run["results"][0]["wrong"] == [] and run["results"][0]["links"][0][2] > 0 and run["error"] == ""
    for verb in ("open_device()", "reg_mr(address", "create_qp(type 3", "to INIT", "to RTR", "to RTS"):
        for rank in (0, 1):
            assert re.search(rf"rank {rank} pid \d+ trace verbs: soft0: .*{re.escape(verb)}.* = 0$", text, re.MULTILINE)
    assert len(text.encode()) < MAX_BYTES and text.startswith("# mlxdist doctor report")


def test_the_name_that_a_machine_gives_itself_is_private(tmp_path):
    """It is replaced where the checks, which ask for it first, have not come to an end."""

    def quote(section: Section, context: Context) -> None:
        assert context.own_names == [socket.gethostname()]
        context.own_names.append("zeppelin.example.com")  # as if of another machine
        section.text = "Welcome to zeppelin"

    path = tmp_path / "report.md"
    assert make_report(context(), path, [*steps("installation"), Step("quote", "Quote", quote, 9)]) == 0
    found = data_of(path.read_text())["sections"]
    assert [section["error"] for section in found.values()] == ["", ""]
    assert "zeppelin" not in path.read_text() and "host" not in found["installation"]["data"]["localhost"]


def test_a_failed_run_has_its_verbs_and_flight_records(tmp_path, monkeypatch):
    """A device that fails every send: the trace shows queue pairs made again, and the records what was waited for."""
    monkeypatch.setenv("MLXDIST_INJECT_FAULTS", "error=1/1")
    text, found = make(tmp_path / "report.md", "soft")
    (run,) = found["soft"]["data"]["runs"]
    assert "GENERAL_ERR" in run["error"] and "GENERAL_ERR" in found["soft"]["error"]
    records = run["flight"]["records"]
    assert {record["rank"] for record in records} == {0, 1}
    assert all("GENERAL_ERR" in record["error"] and record["operations"] for record in records)
    assert "**It has failed.**" in text and re.search(r"rank 0: error: .*last operations: \w+ #", text)
    assert len([line for line in run["trace"] if "create_qp(" in line]) > 4


@pytest.fixture
def library(tmp_path, monkeypatch) -> None:
    """libsoftverbs stands in for a card's library, so every verb is one of the system's."""
    directory = tmp_path / "lib"
    directory.mkdir()
    (directory / "libibverbs.so.1").symlink_to(LIBRARY)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(directory))


@linux
def test_limits_that_a_probe_has_found(library, tmp_path, monkeypatch):
    """The report has them, and where there are none how to get them. It makes no probe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SOFTVERBS_PROFILE", "apple-tb5-27")
    (step,) = steps("devices")

    def report() -> Section:
        section = Section("devices", "RDMA devices")
        step.fill(section, context(cluster=cluster(names=["a"], rdma=facts.devices())))
        return section

    text = report().text
    assert "not probed: `mlxdist devices --probe` on that host" in text and "queue pairs 3" not in text
    keep_probes(list_apart("ibverbs", probe=True).devices)
    section = report()
    assert "connections UC, queue pairs 3, then ENOMEM, receives of a queue pair 4095," in section.text
    assert "messages not found yet: start a job of two hosts" in section.text
    assert section.data["a"]["devices"][0]["probe"]["region_bytes"] == 0xFA0000
    assert section.data["a"]["devices"][0]["queue_pairs"] == 3
    found = PeerProbe(4096, receives=192, larger="LOC_LEN_ERR", packets=True)
    keep_probes(replace(device, peer_probe=found) for device in list_apart("ibverbs").devices)
    text = report().text
    assert "bytes of a message 4096; larger: LOC_LEN_ERR, receives of that size 192 or more," in text
    assert "not found yet" not in text and "queue pairs 3, then ENOMEM" in text


@linux
@pytest.mark.long
def test_an_rdma_device_without_a_second_host(tmp_path, library):
    text, found = make(tmp_path / "report.md", "checks", "devices", "rdma")
    (device, *_) = found["devices"]["data"]["localhost"]["devices"]
    assert device["name"] == "soft0" and device["limits"]["max_qp"] > 0
    assert device["gids"][0]["gid"].startswith("<ipv6-")
    runs = found["rdma"]["data"]["runs"]
    assert [run["name"] for run in runs] == ["localhost soft0 to itself", "localhost soft1 to itself"]
    assert all(run["error"] == "" and run["results"][0]["provider"] == "ibverbs" for run in runs)
    assert "trace verbs: soft1: modify_qp(" in text


@linux
@pytest.mark.long
def test_how_messages_arrive(tmp_path, library, monkeypatch):
    """The runs of the report find it, so the first report has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SOFTVERBS_PROFILE", "apple-tb5")
    text, found = make(tmp_path / "report.md", "checks", "devices", "rdma")
    rows = found["rdma"]["data"]["messages"]
    assert [row[:2] for row in rows] == [["localhost", "soft0"], ["localhost", "soft1"]]
    assert all(row[2].startswith("bytes of a message 131072 or more, ") for row in rows)
    assert "### Messages" in text


@linux
@pytest.mark.long
def test_a_verb_that_is_rejected(tmp_path, library, monkeypatch):
    """This device makes no reliable queue pairs: what was asked for, errno, and what the user is shown of it."""
    monkeypatch.setenv("MLXDIST_QP_TYPE", "rc")
    text, found = make(tmp_path / "report.md", "checks", "rdma")
    run, _ = found["rdma"]["data"]["runs"]
    assert re.search("create_qp .* failed: Operation not supported", run["error"])
    refused = r"verbs: soft0: create_qp\(type 2, send_wr 64, recv_wr 32, .* = -1, errno 95 \(Operation not supported\)"
    assert any(re.search(refused, line) for line in run["trace"]) and re.search(refused, text)


def test_runs_of_a_device_map():
    rows = [[None, ["rdma_en2", "rdma_en3"]], [["rdma_en4", "rdma_en5"], None]]
    hostfile = parse(json.dumps([{"ssh": name, "rdma": row} for name, row in zip("ab", rows)]))
    device = {"state": "ACTIVE", "error": "", "provider": "librdma", "active": True}
    devices = {host: [device | {"name": f"rdma_en{n}"} for n in range(2, 6)] for host in "ab"}
    found, notes = rdma_runs(HostSelection(hostfile), devices)
    assert [run.name for run in found] == ["a rdma_en2 to b rdma_en4", "a rdma_en3 to b rdma_en5"] and notes == []
    assert [[host.rdma for host in run.selection.hostfile.hosts] for run in found] == [
        [((), ("rdma_en2",)), (("rdma_en4",), ())],
        [((), ("rdma_en3",)), (("rdma_en5",), ())],
    ]
    assert {run.settings["MLXDIST_PROVIDER"] for run in found} == {"librdma"}
    devices["b"] = [device | {"name": "rdma_en4", "active": False, "state": "DOWN"}]
    found, notes = rdma_runs(HostSelection(hostfile), devices)
    assert all(run.is_loop and run.hosts == ("a",) for run in found) and "b: rdma_en4 is DOWN" in notes[0]


def fails(section: Section, context: Context) -> None:
    section.text = "what was known before"
    raise ResourceError("the driver does not answer")


def mistakes(section: Section, context: Context) -> None:
    raise ZeroDivisionError


def hangs(section: Section, context: Context) -> None:
    section.text = "what was known before"
    with contextlib.suppress(Exception):
        time.sleep(60)


def works(section: Section, context: Context) -> None:
    section.data = {"answer": 42}


def test_a_run_that_may_fail_leaves_its_section_complete():
    """Without the meeting on the host, which macOS may not allow: the report of a Mac where all is well."""
    late = Section("late", "Late")
    _add_run(late, Run("without that", {}, error="GPU timeout"), may_fail=True)
    assert late.error == "" and "**It has failed.** GPU timeout" in late.text
    _add_run(late, Run("as it is", {}, error="GPU timeout"))
    assert late.error == "as it is: GPU timeout"


def test_sections_that_fail_and_hang(tmp_path, capfd):
    path = tmp_path / "report.md"
    odd = [Step(f.__name__, f.__name__, f, 0.3) for f in (fails, mistakes, hangs, works)]
    assert make_report(context(), path, odd) == 0
    text = path.read_text()
    found = data_of(text)["sections"]
    assert found["fails"]["error"] == "the driver does not answer" and text.count("what was known before") == 2
    assert "ZeroDivisionError" in found["mistakes"]["error"]
    assert found["hangs"]["error"] == "it was given up after 0.3 s" and found["works"]["data"] == {"answer": 42}
    said = " ".join(capfd.readouterr().err.split())
    assert "incomplete or failed, which is worth reporting: fails; mistakes; hangs" in said
    assert f"wrote {path}: " in said and "Look through the file before you share it" in said


@pytest.mark.long
def test_a_report_is_never_larger():
    """Whatever it is of: many sections, each too long; long lines; quotes of the fence; letters of several bytes."""
    long = "~~~~\n" + "é x" * 40_000
    odd = {"lines": ["z" * 10_000] * 5, "text": long, "deep": [[["y" * 500] * 5] * 5]}
    sections = [Section(f"s{n}", f"Section {n}", f"begin\n~~~~text\n{long}\n~~~~\nend", odd, long) for n in range(12)]
    text = write_document(sections, Redactor(environ={}))
    assert len(text.encode()) < MAX_BYTES and text.count(" bytes were cut here ...]") == 2 * 12
    assert len(data_of(text)["sections"]) == 12 and text.count("\nend\n") == 12


def test_what_is_too_long_is_cut():
    """The beginning and the end stay, fences are closed, and the JSON is still JSON."""
    long = fenced("x " * 90_000)
    section = Section("s", "Long", f"begin\n{long}\nend\n", {"list": list(range(1000)), "text": "y" * 5000})
    text = write_document([section, Section("t", "Short", data={"list": [1, 2]})], Redactor(environ={}))
    assert "\nbegin\n" in text and "\nend\n" in text and text.count(" bytes were cut here ...]") == 1
    assert text.count("~~~~text\n") == 2 and len(re.findall(r"^~~~~\n", text, re.MULTILINE)) == 3
    found = data_of(text)["sections"]
    assert found["s"]["data"]["list"][-1] == "[600 entries were cut]" and found["t"]["data"] == {"list": [1, 2]}
    assert found["s"]["data"]["text"].endswith("[1000 characters were cut]")


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrst",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENG",
    "MY_PASSWORD": "correct horse",
    "USER": "gwendolyn",
    "HOME": "/Users/gwendolyn",
    "HF_HOME": "/Users/gwendolyn/models",
    "OMP_PLACES": "c4:7d:46:12:34:56",
}


def named(host: str) -> list[str]:
    """A command that runs another one on a machine of that name."""
    command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    if sys.platform != "linux" or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("only root of Linux may name a machine")
    return command


@pytest.mark.long
def test_private_data_is_left_out(tmp_path):
    """The whole command, with secrets in the environment and names in paths, variables and the host's name."""
    path = tmp_path / "report.md"
    secret = os.urandom(32).hex()
    variables = SECRETS | {"MLXDIST_SECRET": secret, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [*named("Gwendolyns-Mac-Studio"), *DOCTOR, "--report", path],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    sections = data_of(text)["sections"]
    assert list(sections) == [step.name for step in SECTIONS]
    assert {name: found["error"] for name, found in sections.items() if found["error"]} == {}
    for private in [*(value for name, value in SECRETS.items()), secret, "wendolyn", "Mac-Studio"]:
        assert private.lower() not in text.lower(), private
    assert "<host-1>" in text and "/Users/gwendolyn" not in text
    late = sections["late"]["data"]["runs"][0]["results"]
    assert all(result["right"] for result in late) and max(result["seconds"] for result in late) >= 8
    assert "this says nothing about the GPU" in text
    cases = sections["speed"]["data"]["cases"]
    assert len(cases) == 8 and not any(case["wrong"] for case in cases)
    assert os.stat(path).st_size < MAX_BYTES and [file.name for file in tmp_path.glob("*report*")] == ["report.md"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "/no/directory/report.md"], "there is no directory /no/directory"),
        (["--report", "/sys/report.md"], "cannot be written"),
        (["--report", "report.md", "--json"], "leave out --json, --quick and --exclude-failed"),
    ],
)
def test_rejected_before_the_work(arguments, words, tmp_path):
    done = subprocess.run([*DOCTOR, *arguments], capture_output=True, text=True, timeout=20, cwd=tmp_path)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr
    assert list(tmp_path.glob("report*")) == []


@pytest.mark.long
def test_ctrl_c_leaves_what_is_done(tmp_path):
    path = tmp_path / "report.md"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from test_doctor_report import *\n"
        "def fill(section, context):\n"
        "    print('now', flush=True)\n"
        "    steps('late')[0].fill(section, context)\n"
        "chosen = [*steps('soft'), Step('late', 'Late', fill, 60), *steps('speed')]\n"
        f"sys.exit(make_report(context(late_seconds=50.0), Path({str(path)!r}), chosen))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout.readline() == "now\n"
        late(2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    text = path.read_text()
    found = data_of(text)["sections"]
    assert list(found) == ["soft", "late"] and found["soft"]["error"] == ""
    assert found["late"]["error"] == "stopped by Ctrl-C" and "what follows it is missing" in text


@pytest.mark.long
def test_two_hosts(tmp_path):
    """Each host's part is collected there, and the names of both are replaced."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    with ssh_hosts(directory, count=2) as two:
        path = tmp_path / "report.md"
        words = [*DOCTOR, "--ssh", two.ssh, "--hosts", ",".join(two.names), "--report", str(path)]
        done = subprocess.run(
            two.command(*words), capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
        )
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    found = data_of(text)["sections"]
    assert {name: section["error"] for name, section in found.items() if section["error"]} == {}
    assert not set(two.names) & set(re.findall(r"\w+", text))
    for name in ("installation", "devices", "system"):
        assert set(found[name]["data"]) == {"<host-1>", "<host-2>"}, name
    assert [run["name"] for run in found["soft"]["data"]["runs"]] == ["<host-1>", "<host-2>"]
    setup = found["speed"]["data"]["setup"]
    assert setup["ranks"] == 2 and "TCP" in setup["provider"]
    late = found["late"]["data"]["runs"][0]["results"]
    assert [result["late"] for result in sorted(late, key=lambda r: r["rank"])] == [False, True]
    assert "no RDMA device" in " ".join(found["rdma"]["data"]["notes"])


@linux
@pytest.mark.long
def test_a_cable_between_two_hosts_whose_verb_fails(tmp_path, library):
    """Devices that are ACTIVE on both, and do not reach each other: the run of that cable says which verb of which host
    has failed. libsoftverbs finds no device of another host."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    with ssh_hosts(directory, count=2) as two, contextlib.ExitStack() as until:
        for number in (0, 1):
            until.enter_context(exporting(two, number, LD_LIBRARY_PATH=os.environ["LD_LIBRARY_PATH"]))
        rows = [[None, "soft0"], ["soft1", None]]
        entries = [{"ssh": name, "ips": [host.address]} for name, host in zip(two.names, two.hosts)]
        hostfile = tmp_path / "hosts.json"
        hostfile.write_text(json.dumps([entry | {"rdma": row} for entry, row in zip(entries, rows)]))
        path = tmp_path / "report.md"
        words = [*DOCTOR, "--ssh", two.ssh, "--hostfile", str(hostfile), "--report", str(path)]
        done = subprocess.run(
            two.command(*words), capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = data_of(path.read_text())["sections"]["rdma"]["data"]
    (run,) = found["runs"]
    assert run["name"] == "<host-1> soft0 to <host-2> soft1" and "to RTR" in run["error"], run["error"]
    refused = [line for line in run["trace"] if re.search(r"soft[01]: modify_qp\(.* to RTR, .*\), errno \d+$", line)]
    assert refused and {record["rank"] for record in run["flight"].get("records", [])} <= {0, 1}
