"""`mlxdist launch --emulate-nodes`: virtual hosts on one machine, for programs that are to run on several."""

import re

import pytest
from launching import launch, nothing_left, python  # noqa: F401  (nothing_left is a fixture of every test)

PROGRAM = """
import mlxdist, numpy as np
group = mlxdist.init()
x = np.arange(40_000, dtype=np.int64) * (1 + group.rank())
assert (mlxdist.all_sum(x) == np.arange(40_000) * sum(range(1, group.size() + 1))).all()
mesh = mlxdist.mesh(dp=-1, tp=2 if group.size() == 4 else 1)
if group.rank() == 0:
    print(mesh, flush=True)
for rank in range(group.size()):
    mlxdist.barrier()
    if rank == group.rank():
        print(os.environ["MLX_LOCAL_RANK"], flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "nodes", "hosts", "local"),
    [(4, 2, [0, 0, 1, 1], "0101"), (3, 2, [0, 0, 1], "010"), (4, 3, [0, 0, 1, 2], "0100"), (2, 2, [0, 1], "00")],
)
def test_ranks_of_a_virtual_host_share_memory_and_others_do_not(ranks, nodes, hosts, local):
    job = python(ranks, PROGRAM, options=["--emulate-nodes", str(nodes)])
    assert job.returncode == 0, job.stderr
    output = job.stdout.decode()
    for rank, host in enumerate(hosts):
        assert f"[{rank} node{host}] {local[rank]}\n" in output
        assert re.search(rf"^\[0 node0\] +{rank} .* node{host}$", output, re.MULTILINE), output
    assert "dp over TCP" in output
    assert ("tp over shared memory" in output) == (hosts == [0, 0, 1, 1])


def test_a_virtual_host_is_named_in_errors():
    program = "import mlxdist, numpy\nmlxdist.init()\nif rank == 1: raise ValueError('mine')\n"
    job = python(2, program + "mlxdist.all_sum(numpy.ones(3))", options=["--emulate-nodes", "2"])
    assert job.returncode == 1
    assert b"Aborted: rank 1 on node1 aborted the group: ValueError: mine" in job.stderr, job.stderr


# Rank 1 refuses; all ranks print the error that they get.
REFUSED = """
import sys, mlxdist
from mlxdist.base.errors import InvalidArgument
from mlxdist.kv.agreement import answer, propose
from mlxdist.nn.rank_checks import agreed
from mlxdist.train.checkpoint.ranks import together
group = mlxdist.init()

def refuse():
    if rank == 1: raise InvalidArgument('mine')

def of_nn():
    with agreed("model", group): refuse()

def of_kv():
    refusal = InvalidArgument('mine') if rank == 1 else None
    propose({}, refusal, [0], group) if rank == 1 else answer(list, refusal, [1], group)

for name, call in dict(nn=of_nn, train=lambda: together(refuse, group), kv=of_kv).items():
    try: call()
    except InvalidArgument as error: print(f"{name}: {error}", flush=True)
"""


@pytest.mark.long
def test_a_virtual_host_is_named_in_what_ranks_agree_on():
    job = python(2, REFUSED, options=["--emulate-nodes", "2"])
    assert job.returncode == 0, job.stderr
    lines = sorted(job.stdout.decode().splitlines())
    found = [f"{name}: mine [rank 1 on node1]" for name in ("kv", "nn", "train")]
    assert lines == [f"[{rank} node{rank}] {line}" for rank in range(2) for line in found]


def test_a_virtual_host_is_named_in_files(tmp_path):
    """The lock of checkpoints names the process that has it; %h is in the name of a file of debug output."""
    program = (
        "import pathlib, mlxdist\nfrom mlxdist.train.checkpoint.directory import Lock\n"
        f"directory = pathlib.Path({str(tmp_path)!r}, str(rank))\n"
        "lock = Lock(directory, 'run')\nmlxdist.init()\n"
        "print(*(directory / 'lock').read_text().split()[4:], flush=True)"
    )
    options = ["--emulate-nodes", "2", "--env", "MLXDIST_DEBUG=info", "--env", f"MLXDIST_DEBUG_FILE={tmp_path}/%h"]
    job = python(2, program, options=options)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.decode().splitlines()) == ["[0 node0] on node0", "[1 node1] on node1"]
    assert sorted(path.name for path in tmp_path.glob("node*")) == ["node0", "node1"]


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (3, ["--emulate-nodes", "4"], b"3 ranks are too few"),
        (2, ["--emulate-nodes", "2", "--hosts", "localhost"], b"on this machine alone"),
        (2, ["--emulate-nodes", "2", "--backend", "ring"], b"on this machine alone"),
        (2, ["--emulate-nodes", "1"], b"1 is not in the range"),
    ],
)
def test_what_cannot_be_emulated(ranks, options, words):
    job = launch(ranks, "true", options=options)
    assert job.returncode == 2 and words in job.stderr, job.stderr
