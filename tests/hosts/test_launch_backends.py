"""`mlxdist launch --backend`: what MLX's own backends find in the environment of their ranks, and that they run."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launching import LAUNCH, launch, nothing_left  # noqa: F401  (nothing_left is a fixture of every test)

from mlxdist.base.errors import InvalidArgument
from mlxdist.cli import commands
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.launch.backends import DEFAULT_PORT, Exports, choose, free_ports
from mlxdist.launch.mpirun import mpirun_command, pipes_of_rank

SHOW = (
    "import json, os; wanted = ('MLX_', 'NCCL_', 'JACCL_', 'CUDA_')\n"
    "found = {name: value for name, value in os.environ.items() if name.startswith(wanted)}\n"
    "files = {name: json.load(open(found[name])) for name in ('MLX_HOSTFILE', 'MLX_IBV_DEVICES') if name in found}\n"
    "print(json.dumps(found | files))"
)
ALL_SUM = (
    "import sys, mlx.core as mx; group = mx.distributed.init(backend=sys.argv[1], strict=True)\n"
    "total = mx.distributed.all_sum(group.rank() + 1).item()\n"
    "print(f'{group.rank()} of {group.size()} has {total}')"
)


def hostfile(tmp_path, hosts, **others):
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"hosts": hosts} | others))
    return str(path)


def shown(*options):
    """What the ranks have, in their order."""
    job = subprocess.run(
        [*LAUNCH, *options, "--", sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert job.returncode == 0, job.stderr
    return [json.loads(line.partition("] ")[2]) for line in sorted(job.stdout.splitlines())]


def numbers(rank, size, local):
    return {
        "MLX_RANK": str(rank),
        "MLX_GLOBAL_RANK": str(rank),
        "MLX_LOCAL_RANK": str(local),
        "MLX_WORLD_SIZE": str(size),
    }


MORE = [pytest.param(options, marks=pytest.mark.long) for options in (["--connections-per-ip", "2"], ["--stdin", "0"])]


@pytest.mark.parametrize("options", [["--hosts", "localhost"], *MORE])
def test_the_ring_runs(options):
    job = launch(2, sys.executable, "-c", ALL_SUM, "ring", options=["--backend", "ring", *options], timeout=60)
    assert job.returncode == 0, job.stderr
    lines = sorted(line.partition(b"] ")[2] for line in job.stdout.splitlines())
    assert lines == [b"0 of 2 has 3", b"1 of 2 has 3"]


def test_plain_mlx_uses_the_mpi_shim():
    job = launch(2, sys.executable, "-c", ALL_SUM, "any", timeout=60)
    assert sorted(job.stdout.splitlines()) == [b"[0] 0 of 2 has 3", b"[1] 1 of 2 has 3"], job.stderr
    assert shown("-n", "1")[0]["MLX_MPI_LIBNAME"].endswith(("libmlxdist_mpi.so", "libmlxdist_mpi.dylib"))


def test_ring():
    ranks = shown("--backend", "ring", "-n", "2", "--verbose")
    ring = ranks[0]["MLX_HOSTFILE"]
    assert ranks == [numbers(r, 2, r) | {"MLX_HOSTFILE": ring, "MLX_RING_VERBOSE": "1"} for r in range(2)]
    assert [len(addresses) for addresses in ring] == [1, 1] and ring[0] != ring[1]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for addresses in ring for address in addresses)


def test_a_ring_of_one_is_none():
    assert shown("--backend", "ring", "-n", "1") == [numbers(0, 1, 0)]


def test_jaccl_and_nccl_on_one_host(tmp_path):
    file = hostfile(tmp_path, [{"ssh": "localhost", "ips": ["127.0.0.1"], "rdma": [None]}])
    (rank,) = shown("--hostfile", file, "--backend", "jaccl", "-p", "5000")
    expected = {"MLX_JACCL_COORDINATOR": "127.0.0.1:5000", "MLX_IBV_DEVICES": [[None]]}
    assert rank == numbers(0, 1, 0) | expected
    ranks = shown("--backend", "nccl", "-n", "2", "--hosts", "localhost", "--verbose")
    (port,) = {rank["NCCL_PORT"] for rank in ranks}
    common = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": port, "NCCL_DEBUG": "INFO"}
    assert ranks == [numbers(rank, 2, rank) | common | {"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)]


def test_exports_for_a_ring_of_hosts():
    """Ports are those that each host has found, or count up as with MLX's launcher."""
    addresses = {"a": ["10.0.0.1", "10.0.1.1"], "b": ["10.0.0.2", "10.0.1.2"]}
    hosts = parse(json.dumps([{"ssh": name, "ips": ips} for name, ips in addresses.items()]))
    backend = choose("ring", hosts, None)
    assert backend.ports() == [2, 2]
    ring = [["10.0.0.1:7", "10.0.1.1:8"], ["10.0.0.2:7", "10.0.1.2:9"]]
    assert json.loads(backend.exports([[7, 8], [7, 9]]).files["MLX_HOSTFILE"]) == ring
    backend = choose("ring", hosts, None, starting_port=5000, connections=2)
    assert backend.ports() == [0, 0]
    assert json.loads(backend.exports([[], []]).files["MLX_HOSTFILE"]) == [
        ["10.0.0.1:5000", "10.0.0.1:5001", "10.0.1.1:5002", "10.0.1.1:5003"],
        ["10.0.0.2:5004", "10.0.0.2:5005", "10.0.1.2:5006", "10.0.1.2:5007"],
    ]


@pytest.mark.parametrize("name, extra", [("jaccl", {}), ("jaccl-ring", {"MLX_JACCL_RING": "1"})])
def test_exports_for_jaccl(name, extra):
    backend = choose(name, parse(matrix([None, "x"], [["y", "z"], None]).replace('"x"', '["x", "w"]')), None)
    assert backend.ports() == [1, 0]
    devices = json.dumps([[None, ["x", "w"]], [["y", "z"], None]])
    assert backend.exports([[4711], []]) == Exports(
        {"MLX_JACCL_COORDINATOR": "10.0.0.1:4711"} | extra, {"MLX_IBV_DEVICES": devices}
    )
    backend = choose(name, parse(matrix([None, ["x"]], ["y", None])), None, starting_port=5000)
    assert backend.ports() == [0, 0]
    devices = json.dumps([[None, "x"], ["y", None]])
    assert backend.exports([[], []]) == Exports(
        {"MLX_JACCL_COORDINATOR": "10.0.0.1:5000"} | extra, {"MLX_IBV_DEVICES": devices}
    )


@pytest.mark.parametrize("port, given", [(None, "4711"), (12345, "12345")])
def test_exports_for_nccl(port, given):
    backend = choose("nccl", parse("10.0.0.1 slots=2\nb"), None, nccl_port=port)
    assert backend.ports() == [int(port is None), 0]
    exports = backend.exports([[4711] * backend.ports()[0], []])
    assert exports == Exports({"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": given}, {}, ["CUDA_VISIBLE_DEVICES"])


def test_the_port_of_mlxdist():
    port = free_ports(1)[0]
    program = "import os; print(os.environ['MLXDIST_RENDEZVOUS'])"
    for hosts in ([], ["--hosts", "localhost"]):
        job = launch(1, sys.executable, "-c", program, options=["--starting-port", str(port), *hosts])
        assert job.stdout.endswith(b"] 127.0.0.1:%d\n" % port), job.stderr


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = launch(1, "true", options=["--starting-port", str(port)])
    assert job.returncode == 1 and b"rank 0 cannot listen at 127.0.0.1:%d: Address already in use" % port in job.stderr


@pytest.mark.parametrize(
    "found, name", [("", "mlxdist"), ("any", "mlxdist"), ("auto", "mlxdist"), ("mlxdist", "mlxdist"), ("nccl", "nccl")]
)
def test_auto_is_the_backend_of_the_hostfile(found, name):
    hosts = parse(json.dumps({"hosts": [{"ssh": "10.0.0.1"}], "backend": found}))
    assert choose("auto", hosts, None).name == name
    assert choose("ring", hosts, None).name == "ring"


def test_mlxdist_needs_nothing():
    backend = choose("auto", None, 2)
    assert (backend.name, backend.ports(), backend.exports([])) == ("mlxdist", [], Exports())


def matrix(*rows):
    hosts = [{"ssh": f"h{i}", "ips": [f"10.0.0.{i + 1}"], "rdma": row} for i, row in enumerate(rows)]
    return json.dumps(hosts)


@pytest.mark.parametrize(
    "backend, text, words",
    [
        ("ring", "a\nb", "ring: every rank needs an IP address that the others reach it at, and a is a name"),
        ("ring", "localhost\n10.0.0.2", "ring: 10.0.0.2 cannot reach localhost at 127.0.0.1"),
        ("ring", "10.0.0.1\nfe80::1", "ring: MLX speaks IPv4 only here, and fe80::1 has fe80::1"),
        (
            "ring",
            json.dumps([{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2", "10.0.1.2"]}]),
            "as many addresses .* a has 1 and b has 2",
        ),
        ("nccl", "a\n10.0.0.2", "nccl: rank 0 needs an IP address"),
        ("nccl", "fe80::1\nb", "IPv4 only here, and fe80::1 has fe80::1"),
        ("mpi", "me@a\nb", "mpirun knows no users in names such as me@a"),
        ("jaccl", "10.0.0.1\n10.0.0.2", "needs a hostfile that says which device leads to which host"),
        ("jaccl", matrix([None, "x"], ["x", None]).replace("10.0.0.1", "127.0.0.1"), "h1 cannot reach h0 at 127.0.0.1"),
        (
            "jaccl",
            matrix([None, "x", None], ["x", None, "y"], [None, "y", None]),
            "a cable between every two hosts, and the hostfile has no device for h0 to h2, h2 to h0; .* jaccl-ring",
        ),
        (
            "jaccl-ring",
            matrix([None, "x", None], ["x", None, "y"], [None, "y", None]),
            "a ring in the order of the hosts, and the hostfile has no device for h0 to h2, h2 to h0; add them, or",
        ),
        ("jaccl", matrix([None, "x"], ["x", None]).replace('"rdma"', '"slots": 2, "rdma"', 1), "h0 would have 2"),
    ],
)
def test_rejected(backend, text, words):
    with pytest.raises(InvalidArgument, match=words):
        choose(backend, parse(text), None)


def test_a_ring_of_cables_is_enough_for_jaccl_ring():
    text = matrix(*([(["a"] if abs(i - j) in (1, 3) else None) for j in range(4)] for i in range(4)))
    assert choose("jaccl-ring", parse(text), None).name == "jaccl-ring"
    with pytest.raises(InvalidArgument, match="h0 to h2, h1 to h3, h2 to h0 and 1 more"):
        choose("jaccl", parse(text), None)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--backend", "ring", "-p", "65535", "-n", "2"], "--starting-port 65535: the last port would be 65536"),
        (["--backend", "rong", "-n", "2"], "'rong' is not one of"),
        (["--backend", "jaccl", "-n", "1"], "needs a hostfile"),
        (["--backend", "mpi", "-n", "1", "--mpi-arg", "'"], "--mpi-arg: No closing quotation"),
    ],
)
def test_bad_options(arguments, words):
    job = CliRunner().invoke(commands, ["launch", *arguments, "--", "true"])
    assert job.exit_code == 2 and words in job.stderr


def test_no_value_is_on_the_command_line_of_mpirun():
    hosts = parse("node0 slots=2\nnode1").hosts
    words = mpirun_command(hosts, {"TOKEN": "secret"}, "/work", ["--bind-to", "none"], ["python", "x.py"])
    assert "secret" not in " ".join(words)
    text = "--host node0:2,node1:1 --wdir /work -x TOKEN --bind-to none -- sh -c "
    assert text in " ".join(words) and (words[0], words[-2:]) == ("mpirun", ["python", "x.py"])


def test_where_rank_0_of_mpirun_listens():
    """For programs that use mlxdist."""
    for hosts, address in {
        "10.0.0.1\nb": f"10.0.0.1:{DEFAULT_PORT}",
        "a\nb": f"a:{DEFAULT_PORT}",
        "fe80::1\nb": f"[fe80::1]:{DEFAULT_PORT}",
    }.items():
        assert choose("mpi", parse(hosts), None).mpi_address() == address
    assert choose("mpi", parse("a\nb"), None, starting_port=4711).mpi_address() == "a:4711"
    address = choose("mpi", parse("localhost\nb"), None, starting_port=4711).mpi_address()
    assert address == f"{socket.gethostname()}:4711"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", choose("mpi", None, 2).mpi_address())


def test_without_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = CliRunner().invoke(commands, ["launch", "--backend", "mpi", "-n", "2", "--", "true"])
    assert job.exit_code == 1 and "there is no mpirun in PATH; install openmpi" in job.stderr


@pytest.fixture
def open_mpi(monkeypatch):
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on the path (Debian: apt install openmpi-bin)")
    if os.geteuid() == 0:
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


@pytest.mark.long
@pytest.mark.parametrize("hosts", [[], ["--hosts", "localhost"]])
def test_mpi_runs(open_mpi, hosts):
    options = ["--backend", "mpi", "--mpi-arg", "--bind-to none", *hosts]
    job = launch(2, sys.executable, "-c", ALL_SUM, "mpi", options=options, timeout=120)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"[  0] 0 of 2 has 3", b"[  1] 1 of 2 has 3"]


def test_output_of_mpirun_is_labeled_line_by_line(open_mpi, tmp_path):
    """Also lines that are written in pieces, and longer ones than mpirun passes on at once."""
    program = (
        "import os, sys; rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
        "for number in range(50): print(rank, number, 'x' * (number * 200)); print(rank, file=sys.stderr)"
    )
    options = ["--backend", "mpi", "--mpi-arg", "--oversubscribe --bind-to none", "--log-dir", str(tmp_path / "logs")]
    job = launch(3, sys.executable, "-c", program, options=options, timeout=120)
    assert job.returncode == 0, job.stderr
    for rank in range(3):
        lines = [f"{rank} {number} {'x' * (number * 200)}" for number in range(50)]
        assert [f"[  {rank}] {line}" for line in lines] == [
            line for line in job.stdout.decode().splitlines() if line.startswith(f"[  {rank}]")
        ]
        assert job.stderr.decode().splitlines().count(f"[  {rank}] {rank}") == 50
        assert (tmp_path / "logs" / f"rank-{rank}.out").read_text().splitlines() == lines


def in_pipes(directory, program):
    """Rank 0 as mpirun starts it, once the pipes are there."""
    words = mpirun_command(parse("localhost").hosts, [], None, [], ["sh", "-c", program])
    variables = os.environ | {"MLXDIST_ERROR_FILE": str(directory / "first_failure"), "OMPI_COMM_WORLD_RANK": "0"}
    start = words[words.index("--") + 1 :]
    return subprocess.run(start, env=variables, capture_output=True, timeout=60)


def test_a_rank_of_mpirun_whose_output_is_not_read_notices_when_it_writes(tmp_path):
    """The launcher has closed its ends before the rank opens them."""
    for pipe in pipes_of_rank(0, tmp_path):
        os.close(pipe)
    job = in_pipes(tmp_path, "echo unread; echo on >&2")
    assert (job.returncode, job.stdout, job.stderr) == (-signal.SIGPIPE, b"", b"")


def test_a_rank_of_mpirun_on_another_host_leaves_the_pipes_alone(tmp_path):
    """Where hosts share the directory of the job: theirs have another name."""
    pipes = pipes_of_rank(0, tmp_path)
    here = in_pipes(tmp_path, "echo out; echo err >&2")
    assert [os.read(pipe, 10) for pipe in pipes] == [b"out\n", b"err\n"] and (here.stdout, here.stderr) == (b"", b"")
    for path in list(tmp_path.glob(f"{os.uname().nodename}-0.*")):
        path.rename(path.with_name(f"another-0{path.suffix}"))
    there = in_pipes(tmp_path, "echo out; echo err >&2")
    for pipe in pipes:
        os.close(pipe)
    assert (there.stdout, there.stderr) == (b"out\n", b"err\n")


@pytest.mark.parametrize("given, expected", [("--tag-output", b"<stdout>:hi"), ("-merge-stderr-to-stdout", b"] hi")])
def test_output_options_of_mpirun(open_mpi, given, expected):
    job = launch(1, "echo", "hi", options=["--backend", "mpi", "--mpi-arg", f"--bind-to none {given}"], timeout=60)
    assert job.returncode == 0 and job.stdout.startswith(b"[mpi] ") and expected in job.stdout, job.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whom mpirun refuses")
def test_root_gets_the_options_that_mpirun_needs(open_mpi, monkeypatch):
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT")
    options = ["--backend", "mpi", "--mpi-arg", "--bind-to none"]
    job = launch(1, "true", options=options)
    assert job.returncode == 2 and b"add --mpi-arg --allow-run-as-root, or start" in b" ".join(job.stderr.split())
    for option in ("--allow-run-as-root", "-allow-run-as-root"):
        job = launch(1, "true", options=[*options, "--mpi-arg", option], timeout=60)
        assert job.returncode == 0, job.stderr
    job = launch(1, "true", options=[*options, "--dry-run"])
    assert job.returncode == 0 and job.stdout.startswith(b"[mpi] mpirun "), job.stderr


@pytest.mark.long
@pytest.mark.parametrize("hosts", [[], ["--hosts", "localhost"]])
def test_mlxdist_under_mpi(open_mpi, hosts):
    program = "import mlxdist as d, numpy as np; assert d.init().size() == 2 and d.all_sum(np.ones(1)).item() == 2"
    job = launch(2, sys.executable, "-c", program, options=["--backend", "mpi", *hosts], timeout=120)
    assert job.returncode == 0, job.stderr


@pytest.mark.long
def test_the_status_of_mpirun(open_mpi):
    job = launch(2, sys.executable, "-c", "raise SystemExit(3)", options=["--backend", "mpi"], timeout=120)
    assert job.returncode == 3 and b"mlxdist launch: mpirun failed, with exit status 3" in job.stderr
