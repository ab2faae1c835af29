"""`mlxdist launch --record` and `mlxdist record diff`: what a job ran with on each host, and what differs."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner
from fake_ssh import fake_ssh
from launching import launch

from mlxdist.base.credentials import remove_from_environment, remove_from_text, remove_from_words, secret_values
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cli import commands
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.tools.record.difference import differences, read_records, table
from mlxdist.tools.record.write import write_records

SECRET = "correct-horse-battery"
TOKEN = "hf_" + "a1b2c3d4" * 3
# Host b has a variable of its own, another value of a common one, and a package that a lacks.
OTHER_HOST = """
import os
if sys.argv[-2] == "b":
    os.environ.update(ONLY_B="yes", COMMON="2", PYTHONPATH=os.environ["PACKAGES_OF_B"])
sys.exit(subprocess.run(["sh", "-c", command]).returncode)
"""


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with a change, in which a secret is."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    directory = tmp_path / "checkout"
    directory.mkdir()
    file = directory / "train.py"
    file.write_text("print(1)\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q", "-b", "main"), ("add", "train.py"), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=directory, check=True)
    file.write_text(f"print(2)  # {TOKEN}\n")
    return directory


def test_a_job_on_this_machine(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    where = ("--record", tmp_path / "records", "--cwd", checkout, "--env", f"HF_TOKEN={TOKEN}", "--env", "STEPS=3")
    command = (sys.executable, "train.py", "--name", SECRET)
    done = launch(2, *command, options=where)
    assert (done.returncode, done.stderr) == (0, b"") and sorted(done.stdout.split()) == [b"2", b"2", b"[0]", b"[1]"]
    (file,) = (tmp_path / "records").iterdir()
    assert file.name == f"{socket.gethostname()}.json" and file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert SECRET not in text and TOKEN not in text
    record = json.loads(text)
    assert record["versions"]["Python"].endswith(sys.version.split()[0])
    assert record["packages"]["click"] and int(record["hardware"]["cores"]) >= 1
    assert record["environment"]["STEPS"] == "3" and record["environment"]["HF_TOKEN"] == "<removed>"
    assert record["job"]["command"] == [*command[:3], "<removed>"] and record["job"]["ranks"] == 2
    git = record["git"]
    assert git["root"] == str(checkout) and git["branch"] == "main" and len(git["commit"]) == 40
    assert "+print(2)  # <removed>" in git["diff"] and " M train.py" in git["status"] and git["diff_is_complete"]
    # What is there stays, and nothing starts.
    done = launch(2, *command, options=where)
    assert done.returncode == 2 and b"is there already" in done.stderr and not done.stdout


@pytest.fixture
def two_hosts(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    (packages / "of_b-1.5.dist-info").mkdir(parents=True)
    (packages / "of_b-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: of_b\nVersion: 1.5\n")
    monkeypatch.setenv("PACKAGES_OF_B", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COMMON", "1")
    return fake_ssh(tmp_path, OTHER_HOST)


def write(directory, ssh_config, hosts=("a", "b")):
    return write_records(
        directory,
        [Host(name) for name in hosts],
        ssh_config,
        command=["python", "train.py"],
        ranks=2,
        variables={"SET": "by the launcher"},
        working_directory=str(directory.parent),
        mpi_shim=True,
    )


def test_what_differs_between_hosts(two_hosts, tmp_path):
    directory = tmp_path / "records"
    records = write(directory, two_hosts)
    assert sorted(path.name for path in directory.iterdir()) == ["a.json", "b.json"]
    assert all(record["environment"]["SET"] == "by the launcher" for record in records.values())
    found = {one.what: one.values for one in differences(records)}
    assert found.pop("variable PYTHONPATH")
    assert found == {
        "package of-b": {"not there": ["a"], "1.5": ["b"]},
        "variable COMMON": {"1": ["a"], "2": ["b"]},
        "variable ONLY_B": {"not there": ["a"], "yes": ["b"]},
    }
    assert read_records([directory]).keys() == {"a", "b"} and differences(read_records([directory]))
    shown = CliRunner().invoke(commands, ["record", "diff", str(directory)])
    assert shown.exit_code == 1
    lines = [line.split() for line in shown.output.splitlines()]
    assert lines[0] == ["what", "value", "hosts"] and ["variable", "COMMON", "1", "a"] in lines and ["2", "b"] in lines
    as_json = CliRunner().invoke(commands, ["record", "diff", "--json", str(directory)])
    assert {"what": "package of-b", "values": {"not there": ["a"], "1.5": ["b"]}} in json.loads(as_json.output)
    assert "2 more differ" in table(differences(records), 2)


def test_two_starts_are_compared(two_hosts, tmp_path):
    for run in ("monday", "tuesday"):
        write(tmp_path / run, two_hosts, hosts=("a",))
    words = ["record", "diff", str(tmp_path / "monday"), str(tmp_path / "tuesday")]
    same = CliRunner().invoke(commands, words)
    assert (same.exit_code, same.output) == (0, "The records do not differ.\n")
    file = tmp_path / "tuesday" / "a.json"
    record = json.loads(file.read_text())
    record["versions"]["mlx"] = "9.9\x1b[2J" + "9" * 100
    file.write_text(json.dumps(record))
    other = CliRunner().invoke(commands, words)
    assert other.exit_code == 1 and "9.9?[2J999" in other.output and "\x1b" not in other.output
    assert other.output.endswith(" tuesday/a\n")


def test_a_host_that_does_not_respond_starts_nothing(tmp_path):
    ssh = fake_ssh(tmp_path, "sys.exit('no route to host')")
    with pytest.raises(ResourceError, match="--record: a does not respond: no route to host"):
        write(tmp_path / "records", ssh)
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2}', '{"schema": 1, "host": 3}'])
def test_what_is_no_record_is_rejected(tmp_path, content):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=r"a\.json is no record"):
        read_records([tmp_path])
    with pytest.raises(InvalidArgument, match="there are 1 records to compare"):
        read_records([tmp_path / "a.json"])


def test_secrets_in_variables_and_command_lines():
    environ = {"API_KEY": SECRET, "URL": f"https://me:{SECRET}@host/", "TOKENIZERS_PARALLELISM": "false", "X": TOKEN}
    removed = remove_from_environment(environ)
    assert removed == {
        "API_KEY": "<removed>",
        "TOKENIZERS_PARALLELISM": "false",
        "URL": "https://<removed>@host/",
        "X": "<removed>",
    }
    secrets = secret_values(environ)
    words = ["run", "--api-key", "abc", "--tokenizer", "a/b", "--max_tokens=100", "--token=abcdef", f"see {SECRET}"]
    shown = ["run", "--api-key", "<removed>", "--tokenizer", "a/b", "--max_tokens=100", "--token=<removed>"]
    assert remove_from_words(words, secrets) == [*shown, "see <removed>"]
    code = "token = tokens[0]  # the next one"
    assert remove_from_text(code, secrets) == code
