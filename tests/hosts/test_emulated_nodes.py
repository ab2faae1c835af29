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
