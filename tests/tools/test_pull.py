"""`mlxdist pull`: a model on every host, each byte sent once, what hosts have kept, and what may go wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys

import fake_hub
import pytest
from fake_hub import serving
from mlx_lm.utils import load_model as mlx_lm_load_model
from rank_counts import one_to_four
from ssh_hosts import ssh_hosts

from mlxdist.base.model_directory import model_directory
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.tools.models.places import Manifest
from mlxdist.tools.models.pull import _variables
from mlxdist.tools.models.pull_rank import MARK
from mlxdist.tools.models.tiny_model import make_tiny_model

FIRST, PORT = "10.213.77.1", 8317  # where the first host of hosts.py has its hub
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
}
CHECKED = {"commit": "", "files": [{"name": "config.json", "size": 3, "blob": ""}], "missing": []}


@one_to_four(3)
def test_each_byte_leaves_the_first_host_once(run_scenarios, ranks, tmp_path):
    run_scenarios("pull.py", ranks, "copies", tmp_path, environment={"MLXDIST_ALGO": "ring"})


@one_to_four(3)
@pytest.mark.parametrize(
    "scenario",
    [
        *("to_another_folder", "resumed", "several_sources", "only_others_offer", "in_the_cache_of_the_hub", "refused"),
        *("full_disk", "locked", "not_all_take_part"),
    ],
)
def test_what_hosts_have(run_scenarios, ranks, scenario, tmp_path):
    if ranks == 1 and scenario in ("several_sources", "only_others_offer", "full_disk", "locked"):
        pytest.skip("a host alone receives nothing")
    run_scenarios("pull.py", ranks, scenario, tmp_path)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("scenario", ["changed", "shortened"])
def test_a_file_that_changes_meanwhile(run_scenarios, ranks, scenario, tmp_path):
    run_scenarios("pull.py", ranks, scenario, tmp_path, resident=False)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_what_arrives_damaged_is_not_kept(run_scenarios, ranks, tmp_path):
    run_scenarios("pull.py", ranks, "damaged", tmp_path, resident=False)
    assert not list((tmp_path / "rank1").rglob("model-*.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_a_write_that_the_system_refuses(run_scenarios, ranks, tmp_path):
    run_scenarios("pull.py", ranks, "writing_fails", tmp_path, resident=False)
    run_scenarios("pull.py", ranks, "continued", tmp_path)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_a_host_that_disappears_and_the_next_pull(run_ranks, run_scenarios, ranks, tmp_path):
    outputs = run_ranks("pull.py", ranks, "interrupted", tmp_path, status=None, timeout=60)
    assert all("others have noticed" in output for output in outputs[:-1]), outputs
    run_scenarios("pull.py", ranks, "continued", tmp_path)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"files": [{"name": "../config.json", "size": 3, "blob": ""}]}, "leads out of the model's directory"),
        ({"files": [{"name": "a/../../b", "size": 3, "blob": ""}]}, "leads out of the model's directory"),
        ({"files": [{"name": "/etc/passwd", "size": 3, "blob": ""}]}, "leads out of the model's directory"),
        ({"files": [{"name": "a\\b", "size": 3, "blob": ""}]}, "leads out of the model's directory"),
        ({"files": [{"name": ".ssh/authorized_keys", "size": 3, "blob": ""}]}, "is hidden"),
        ({"files": [{"name": "a\n", "size": 3, "blob": ""}]}, "no name of a file"),
        ({"files": [{"name": "a" * 201, "size": 3, "blob": ""}]}, "leads out of"),
        ({"files": [{"name": "a/" * 300 + "b", "size": 3, "blob": ""}]}, "no name of a file"),
        ({"files": [{"name": "", "size": 3, "blob": ""}]}, "no name of a file"),
        ({"files": [{"name": "a", "size": -1, "blob": ""}]}, "a whole number"),
        ({"files": [{"name": "a", "size": 2**60, "blob": ""}]}, "a whole number"),
        ({"files": [{"name": "a", "size": 3, "blob": "../x"}]}, "is no hash"),
        ({"files": CHECKED["files"] * 5000}, "no list of at most 4096"),
        ({"commit": "main"}, "is no hash"),
        ({"missing": ["../x"]}, "leads out of"),
        ({"files": None}, "no list"),
    ],
)  # fmt: skip
def test_lists_of_files_from_another_host_are_checked(changed, problem):
    assert Manifest.from_json(json.dumps(CHECKED).encode()).size == 3
    with pytest.raises(ValueError, match=problem):
        Manifest.from_json(json.dumps(CHECKED | changed).encode())


@pytest.fixture
def model(tmp_path):
    """A small model with weights of some chunks."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(LLAMA))
    make_tiny_model(str(tmp_path / "config"), tmp_path / "tiny", fixed={"vocab_size": 20000})
    return tmp_path / "tiny"


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    with serving(model, "org/tiny") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield found


def run(*words, status=0, timeout=100, before=(), environment=None):
    command = [*before, sys.executable, "-m", "mlxdist", *words]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.long
def test_from_the_hub_to_this_machine(hub, model, monkeypatch):
    done = run("pull", "org/tiny", "--json")
    found = json.loads(done.stdout)
    size = sum(file.stat().st_size for file in model.iterdir())
    assert found == {"model": "org/tiny", "files": 3, "size": size, "received": {"localhost": 0}, "shards": {}}
    assert mlx_lm_load_model(model_directory("org/tiny"))[1]["model_type"] == "llama"
    assert hub.sent == {file.name: file.stat().st_size for file in model.iterdir()}
    run("pull", "org/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    run("pull", "org/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("pull", "org/tiny").stdout.splitlines()[0] == "localhost  complete"
    assert hub.sent == {file.name: file.stat().st_size for file in model.iterdir()}


def test_hosts_that_wait_for_others_do_not_warn(monkeypatch):
    """A file may take hours, and a host that has it waits for those that do not."""
    monkeypatch.delenv("MLXDIST_STALL_WARNING", raising=False)
    assert _variables(HostSelection())["MLXDIST_STALL_WARNING"] == "0"
    monkeypatch.setenv("MLXDIST_STALL_WARNING", "5")
    assert "MLXDIST_STALL_WARNING" not in _variables(HostSelection())


@pytest.mark.long
def test_a_model_that_the_hub_does_not_have(hub):
    errors = run("pull", "org/other", status=1).stderr
    assert "Error: localhost: org/other cannot be fetched from the Hugging Face Hub: " in errors and "404" in errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_hub_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    errors = run("pull", "org/tiny", status=1).stderr
    assert "Please check your internet connection" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("org/tiny", "--to", "/tmp/x"), "--to is for a folder; org/tiny comes from the hub"),
        (("/no/such/folder",), "is a folder; give the hosts that are to have it"),
    ],
)
def test_arguments_that_do_not_fit(words, problem):
    assert problem in " ".join(run("pull", *words, status=2).stderr.split())


@pytest.mark.long
def test_a_download_that_breaks_off_goes_on(hub, model):
    weights = model / "model.safetensors"
    hub.cut = weights.stat().st_size // 3
    run("pull", "org/tiny")
    assert (model_directory("org/tiny") / weights.name).read_bytes() == weights.read_bytes()
    assert weights.stat().st_size <= hub.sent[weights.name] <= weights.stat().st_size + weights.stat().st_size // 3


@pytest.mark.long
def test_downloads_that_arrive_damaged_are_removed(hub, model):
    second = model / "model-of-drafts.safetensors"
    second.write_bytes(b"other" + (model / "model.safetensors").read_bytes())
    hub.wrong = True
    errors = run("pull", "org/tiny", status=1).stderr
    assert "has arrived damaged, and 1 more file: its SHA-256 is not that of the hub" in errors
    hub.wrong = False
    run("pull", "org/tiny")
    for weights in (model / "model.safetensors", second):
        assert (model_directory("org/tiny") / weights.name).read_bytes() == weights.read_bytes()


@pytest.mark.long
def test_a_download_whose_check_was_interrupted_is_checked_by_the_next_pull(hub, model, tmp_path):
    """The process is killed when all bytes have come, and before they are compared with their SHA-256."""
    hub.wrong = True
    killed = tmp_path / "killed.py"
    killed.write_text(
        "import os, signal\nfrom mlxdist.tools.models import fetch\n"
        "fetch.beginnings = lambda path, lengths: os.kill(os.getpid(), signal.SIGKILL)\n"
        "fetch.fetch('org/tiny', lambda what, done, of: None)\n"
    )
    assert subprocess.run([sys.executable, killed], timeout=100).returncode == -signal.SIGKILL
    hub.wrong = False
    assert "has arrived damaged" in run("pull", "org/tiny", status=1).stderr
    run("pull", "org/tiny")
    weights = model / "model.safetensors"
    assert (model_directory("org/tiny") / weights.name).read_bytes() == weights.read_bytes()
    assert not list(model_directory("org/tiny").parents[1].glob(".mlxdist*"))


@pytest.mark.long
def test_a_download_reports_its_progress(hub, model):
    arguments = {"step": "fetch", "model": "org/tiny", "to": "", "hub": True}
    command = [sys.executable, "-m", "mlxdist.tools.models.pull_rank", json.dumps(arguments)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.splitlines()
    told = [json.loads(line.removeprefix(MARK)) for line in lines]
    assert all(fields["what"] == "downloading org/tiny" and fields["done"] <= fields["of"] for fields in told)
    assert told[-1]["of"] == sum(file.stat().st_size for file in model.iterdir())


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Three hosts, each with a cache of its own."""
    variables = f"HF_HUB_CACHE={{directory}}/{{name}}/hub HF_ENDPOINT=http://{FIRST}:{PORT}"
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), count=3, variables=variables) as found:
        assert found.hosts[0].address == FIRST
        yield found


@pytest.fixture
def on(nodes, model):
    """A function that runs a command on the three hosts, of which the first one reaches a hub."""
    hosts = ["--hosts", ",".join(nodes.names), "--ssh", nodes.ssh]
    # The namespaces share a kernel, and could share memory.
    environment = os.environ | {"MLXDIST_SOFT_TRANSPORT": "tcp"}
    server = subprocess.Popen(nodes.command(sys.executable, fake_hub.__file__, FIRST, PORT, model, "org/tiny"))

    def on_hosts(*words, **options):
        return run(*words, *hosts, before=nodes.command(), environment=environment, **options)

    on_hosts.hub = server
    try:
        yield on_hosts
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_from_the_hub_to_three_hosts(nodes, on, model):
    """By TCP between namespaces: each byte leaves the first host once. All caches are complete, and serve mlx-lm."""
    before = [(host.sent_bytes(), host.received_bytes()) for host in nodes.hosts]
    found = json.loads(on("pull", "org/tiny", "--json").stdout)
    size = sum(file.stat().st_size for file in model.iterdir())
    assert found["received"] == {"node0": 0, "node1": size, "node2": size}
    after = [(host.sent_bytes(), host.received_bytes()) for host in nodes.hosts]
    sent, received = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after)))
    assert size <= sent[0] < 1.2 * size and size <= sent[1] < 1.2 * size, (sent, size)
    assert size <= received[1] < 1.2 * size and size <= received[2] < 1.2 * size, (received, size)
    for name in nodes.names:
        snapshot = nodes.directory / name / "hub" / "models--org--tiny" / "snapshots" / fake_hub.COMMIT
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == {
            path.name: path.read_bytes() for path in model.iterdir()
        }
    again = on("pull", "org/tiny").stdout.splitlines()
    assert again[:3] == [f"{name}  complete" for name in nodes.names] and again[3].startswith("org/tiny: 3 files, ")
    listed = json.loads(on("models", "--json").stdout)
    assert [(row["host"], row["model"], row["missing"]) for row in listed] == [
        (name, "org/tiny", "") for name in nodes.names
    ]


@pytest.mark.long
def test_only_shards_to_other_hosts(nodes, on, model):
    """The second host gets its stage alone, and a later pull completes it."""
    shutil.rmtree(nodes.directory / "node1" / "hub", ignore_errors=True)
    two = ("--exclude", "node2")
    found = json.loads(on("pull", "org/tiny", *two, "--only-shards", "--pipeline", "--json").stdout)
    size = sum(file.stat().st_size for file in model.iterdir())
    assert found["shards"] == {"node1": "rank 1 of 2, pp=2"}
    assert found["received"]["node0"] == 0 < found["received"]["node1"] < 0.95 * size
    rows = {row["host"]: row for row in json.loads(on("models", *two, "--json").stdout)}
    assert rows["node0"]["shards"] == rows["node0"]["missing"] == ""
    assert rows["node1"]["shards"] == "rank 1 of 2, pp=2" and "mlxdist pull org/tiny" in rows["node1"]["missing"]
    assert rows["node1"]["bytes"] < 0.98 * size  # with the record
    assert "shards of rank 1 of 2, pp=2" in on("models", *two).stdout
    assert on("pull", "org/tiny", *two).stdout.splitlines()[1].startswith("node1  complete, ")
    assert not any(row["shards"] for row in json.loads(on("models", *two, "--json").stdout))


@pytest.mark.long
def test_a_model_that_only_another_host_has(nodes, on, model):
    """The hub does not answer, and the first host has lost its copy."""
    on("pull", "org/tiny")
    on.hub.kill()
    on.hub.wait()
    shutil.rmtree(nodes.directory / "node0" / "hub")
    done = on("pull", "org/tiny", "--json")
    size = sum(file.stat().st_size for file in model.iterdir())
    assert json.loads(done.stdout)["received"] == {"node0": size, "node1": 0, "node2": 0}
    assert "node0: org/tiny cannot be fetched" in done.stderr and "it came from another host" in done.stderr


@pytest.mark.long
def test_a_host_that_cannot_write(nodes, on):
    """Its error, in one sentence, with its name; the others have what they had."""
    there = nodes.directory / "node1" / "hub"
    there.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(there / "models--org--tiny", ignore_errors=True)
    (there / "models--org--tiny").write_text("no directory")
    done = on("pull", "org/tiny", status=1)
    assert f"Error: node1: {there}/models--org--tiny cannot be made: File exists\n" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "Fetching" not in done.stderr
    (there / "models--org--tiny").unlink()
