"""A launcher on each node, started by hand or by srun: two of them on this machine, and SLURM's variables by table."""

import contextlib
import os
import re
import secrets
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launching import LAUNCH, nothing_left  # noqa: F401  (nothing_left is a fixture of every test)

from mlxdist.base.environment import same_job
from mlxdist.base.errors import InvalidArgument
from mlxdist.cli import commands
from mlxdist.launch.backends import DEFAULT_PORT, free_ports
from mlxdist.launch.nodes import Nodes, allocation, from_options, from_slurm_step

SECRET = {"MLXDIST_SECRET": "ab" * 32}
IN_SLURM = ("SLURM_", "OMPI_", "PMI", "MLXDIST_")
PROGRAM = (
    "import mlxdist, numpy, os\n"
    "print(os.environ['MLX_LOCAL_RANK'], mlxdist.init().size(), mlxdist.all_sum(numpy.ones(1)).item())\n"
)


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in [name for name in os.environ if name.startswith(IN_SLURM)]:
        monkeypatch.delenv(name)


def run_nodes(program, options, *variables):
    """One launcher for each item of ``variables``. Status, lines, errors of each."""
    command = [*LAUNCH, "-n", "2", "--grace-period", "1"]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, *options(number), "--", sys.executable, "-c", program],
                    env=os.environ | own,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for number, own in enumerate(variables)
        ]
        outputs = [process.communicate(timeout=60) for process in started]
    return [(process.returncode, sorted(out.splitlines()), err) for process, (out, err) in zip(started, outputs)]


def by_hand(port):
    return lambda number: ["--nodes", "2", "--node-rank", str(number), "--master-addr", f"127.0.0.1:{port}"]


def slurm(number, **others):
    names = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2"}
    own = {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2"}
    return names | own | SECRET | others


def test_two_nodes():
    secret = {"MLXDIST_SECRET": secrets.token_hex(32)}
    first, second = run_nodes(PROGRAM, by_hand(free_ports(1)[0]), secret, secret)
    assert first == (0, ["[0] 0 4 4.0", "[1] 1 4 4.0"], "")
    assert second == (0, ["[2] 0 4 4.0", "[3] 1 4 4.0"], "")


def test_the_failure_of_one_node_ends_the_others():
    program = PROGRAM + ("import sys\nif mlxdist.get_rank() == 2:\n    os._exit(7)\nmlxdist.all_sum(numpy.ones(1))\n")
    secret = {"MLXDIST_SECRET": secrets.token_hex(32)}
    first, second = run_nodes(program, by_hand(free_ports(1)[0]), secret, secret)
    assert first[0] == 1 and "mlxdist launch: node 0: rank " in first[2] and "PeerLost: rank 2" in first[2]
    assert second[0] == 7 and "node 1: rank 2 failed first, with exit status 7" in second[2]


@pytest.mark.long
def test_nodes_by_srun():
    """As srun starts them, on a machine that is called as SLURM's first node."""
    here = {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(free_ports(1)[0])}
    first, second = run_nodes(PROGRAM, lambda number: [], slurm(0, **here), slurm(1, **here))
    assert first == (0, ["[0] 0 4 4.0", "[1] 1 4 4.0"], "")
    assert second == (0, ["[2] 0 4 4.0", "[3] 1 4 4.0"], "")


@pytest.mark.long
def test_nodes_with_different_secrets():
    both = [{"MLXDIST_SECRET": secrets.token_hex(32), "MLXDIST_RENDEZVOUS_TIMEOUT": "3"} for _ in range(2)]
    ends = run_nodes(PROGRAM, by_hand(free_ports(1)[0]), *both)
    assert all(status == 1 for status, _, _ in ends) and "its MLXDIST_SECRET is not this job's" in ends[1][2]


def test_names_of_the_job():
    """What the nodes have in common is in front; on one machine they do not clash, and one after the other neither."""
    nodes = [Nodes(2, number, "h", 1, "ab" * 32) for number in range(2)]
    names = [nodes[0].job("0" * 16), nodes[1].job("1" * 16), nodes[0].job("2" * 16)]
    assert len({name[:8] for name in names}) == 1 and len(set(names)) == 3
    assert re.fullmatch(r"[0-9a-f]{8}\.node0\.0{16}", names[0])
    assert all(same_job(names[0], name) for name in names)
    assert same_job(nodes[0].job("aa.0"), nodes[1].job("bb.1")), "inside different jobs"
    other = Nodes(2, 1, "h", 1, "cd" * 32).job("1" * 16)
    assert not same_job(names[0], other) and not same_job("a", "b") and same_job("a.b", "a.b")


@pytest.mark.parametrize(
    "master, address",
    [
        ("node0", ("node0", DEFAULT_PORT)),
        ("node0:80", ("node0", 80)),
        ("10.0.0.1", ("10.0.0.1", DEFAULT_PORT)),
        ("fe80::1", ("fe80::1", DEFAULT_PORT)),
        ("[fe80::1]", ("fe80::1", DEFAULT_PORT)),
        ("[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_addresses(master, address):
    nodes = from_options(2, 1, master, None, SECRET)
    assert (nodes.host, nodes.port) == address
    assert nodes.interface == ("" if nodes.host == "node0" else nodes.host)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((None, 1, None, None, SECRET), "--node-rank goes with --nodes N"),
        ((None, None, "h", None, SECRET), "--master-addr goes with --nodes N"),
        ((2, None, "h", None, SECRET), "--nodes needs --node-rank R"),
        ((2, 0, None, None, SECRET), "--master-addr HOST"),
        ((2, 2, "h", None, SECRET), "--node-rank 2 does not fit --nodes 2: nodes are 0 to 1"),
        ((2, -1, "h", None, SECRET), "--node-rank -1 does not fit"),
        ((2, 0, "h:x", None, SECRET), "--master-addr: 'h:x' is not an address"),
        ((2, 0, "", None, SECRET), "--master-addr: "),
        ((2, 0, "h:0", None, SECRET), "--master-addr: 'h:0' is not an address"),
        ((2, 0, "h", None, {}), r"needs a secret .* type `export MLXDIST_SECRET=\$\(openssl rand -hex 32\)`"),
        ((2, 0, "h", None, {"MLXDIST_SECRET": "abc"}), "MLXDIST_SECRET must be 32 to 256 hex digits"),
        ((2, 0, "no-such-host.invalid", None, SECRET), "node 0 does not know no-such-host.invalid, its own name: "),
        ((2, 0, "h", "/no/such", SECRET), "--secret-file /no/such: No such file"),
    ],
)
def test_rejected(arguments, words):
    with pytest.raises(InvalidArgument, match=words):
        from_options(*arguments)


def test_the_secret_of_a_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("cd" * 32 + "\n")
    file.chmod(0o640)
    with pytest.raises(InvalidArgument, match=f"others may read it; type: chmod 600 {file}"):
        from_options(2, 0, "h", str(file), {})
    file.chmod(0o600)
    assert from_options(2, 0, "localhost", str(file), SECRET).secret == "cd" * 32, "before the variable"
    assert "cdcd" not in repr(from_options(2, 0, "localhost", str(file), {}))
    file.write_text("ef" * 32, encoding="utf-8-sig")
    assert from_options(2, 0, "localhost", str(file), {}).secret == "ef" * 32
    file.write_text("not hex")
    with pytest.raises(InvalidArgument, match=f"--secret-file {file} must be 32 to 256 hex digits"):
        from_options(2, 0, "h", str(file), {})


@pytest.mark.parametrize(
    "variables, expected",
    [
        (slurm(0), ("n1", 20272, 0)),
        (slurm(1), ("n1", 20272, 1)),
        (slurm(1, SLURM_STEP_ID="3"), ("n1", 20275, 1)),
        (slurm(1, SLURM_STEP_NODELIST="n[2-3]"), ("n2", 20272, 1)),
        (slurm(0, SLURM_JOB_ID="999999999999"), ("n1", 29984, 0)),
        (slurm(1, SLURM_STEP_NUM_NODES="", SLURM_NNODES="2"), ("n1", 20272, 1)),
        # Not a job on several nodes: no srun, one node, a launcher inside one that srun has started.
        ({name: value for name, value in slurm(0).items() if name != "SLURM_STEP_ID"}, None),
        (slurm(0, SLURM_STEP_NUM_NODES="1"), None),
        (slurm(0, MLXDIST_JOB="abc"), None),
        ({}, None),
    ],
)
def test_slurm_steps(variables, expected):
    nodes = from_slurm_step(variables, None)
    assert (nodes and (nodes.host, nodes.port, nodes.number)) == expected


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 launchers on 2 nodes; one on each .* --ntasks-per-node=1"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID='2' is none of the 2 nodes"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x' is not a number"),
        ({"SLURM_JOB_NODELIST": ""}, "does not say where node 0 is"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "a ] is missing"),
        ({"MLXDIST_SECRET": "x"}, "MLXDIST_SECRET must be 32"),
    ],
)
def test_slurm_variables_that_do_not_fit(changes, words):
    with pytest.raises(InvalidArgument, match=words):
        from_slurm_step(slurm(0, **changes), None)


def test_the_hosts_of_an_allocation(monkeypatch):
    assert allocation({}) is None
    for name, value in {"SLURM_JOB_NODELIST": "localhost,n[1-2]", "SLURM_TASKS_PER_NODE": "2,1(x2)"}.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(commands, ["launch", "--dry-run", "--", "train"])
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()[:7]
    assert lines[:4] == ["[0 localhost] train", "[1 localhost] train", "[2 n1       ] train", "[3 n2       ] train"]
    assert [line.split(": ")[0] for line in lines[4:]] == ["localhost", "n1", "n2"]
    shown = CliRunner().invoke(commands, ["launch", "-n", "1", "--dry-run", "--", "true"])
    assert shown.stdout == "[0] true\n", "-n says that it is for this machine"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--hosts", "a"], "--nodes is for launchers that something else starts on each node"),
        (["-n", "200"], "2 nodes with 200 ranks each; at most 256 ranks"),
        ([], "Missing option '-n'"),
        (["-n", "1", "--max-restarts", "1"], "--max-restarts is not for --nodes"),
        (["-n", "1", "--starting-port", "4711"], "the port is in --master-addr"),
        (["-n", "1", "--backend", "ring"], "--backend ring has to know the addresses of all hosts"),
    ],
)
def test_what_does_not_go_with_nodes(monkeypatch, options, words):
    monkeypatch.setenv("MLXDIST_SECRET", "ab" * 32)
    nodes = ["--nodes", "2", "--node-rank", "0", "--master-addr", "localhost"]
    job = CliRunner().invoke(commands, ["launch", *nodes, *options, "--", "true"])
    assert job.exit_code == 2 and words in job.stderr


def test_a_secret_without_nodes(tmp_path):
    job = CliRunner().invoke(commands, ["launch", "--secret-file", str(tmp_path), "-n", "1", "--", "true"])
    assert job.exit_code == 2 and "--secret-file goes with --nodes." in job.stderr
