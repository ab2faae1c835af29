"""train.elastic: the others go on when ranks are lost, with the weights that a run without losses has."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from guides import program_of
from launching import RANK_SCRIPTS, launch, nothing_left, python  # noqa: F401

SCRIPT = RANK_SCRIPTS / "elastic_training.py"
STEPS = 300


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    file = tmp_path_factory.mktemp("reference") / "weights.npz"
    command = [sys.executable, SCRIPT, file, str(STEPS)]
    assert subprocess.run(command, timeout=120).returncode == 0
    return dict(np.load(file))


def train(file, *arguments, ranks=4, options=()):
    elastic = ["--elastic", "1", *options]
    return launch(ranks, sys.executable, str(SCRIPT), str(file), str(STEPS), *arguments, options=elastic, timeout=120)


# Each seed loses about three processes; the long tests together more than fifty.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 18))])
def test_weights_after_losses_at_random_moments(reference, seed, tmp_path):
    """Equal to those of one process, but for the order in which gradients are added up."""
    job = train(tmp_path / "weights.npz", str(seed), options=["--max-restarts", "9"])
    said = job.stderr.decode()
    assert job.returncode == 0, said
    assert "is lost (killed by SIGKILL" in said
    found = dict(np.load(tmp_path / "weights.npz"))
    assert found.keys() == reference.keys()
    for name, weights in reference.items():
        np.testing.assert_allclose(found[name], weights, rtol=2e-3, atol=2e-4, err_msg=name)


KILLED = """import os, signal, sys
from mlxdist.train import InMemoryCheckpoint
save = InMemoryCheckpoint.save
def save_or_die(self, step, state):
    if os.environ["MLXDIST_RANK"] == "2" and os.environ.get("MLXDIST_EPOCH", "0") == "0" and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, step, state)
InMemoryCheckpoint.save = save_or_die
"""


def test_the_guide(tmp_path):
    """Its training, of which a rank is lost, and its program without train.elastic."""
    guide = Path(__file__).parents[2] / "docs" / "elastic.md"
    program = program_of(guide, tmp_path)
    program.write_text(KILLED + program.read_text())
    job = launch(3, sys.executable, str(program), options=["--elastic", "2"], timeout=90)
    assert job.returncode == 0 and b"rank 2 is lost" in job.stderr, job.stderr
    assert job.stdout.count(b" on 2 ranks\n") == 2
    job = launch(2, sys.executable, str(program_of(guide, tmp_path, 1)), options=["--elastic", "1"], timeout=90)
    assert sorted(job.stdout.splitlines()) == [b"[0] 100 200.0", b"[1] 100 200.0"], job.stderr


KEPT = """
import mlx.core as mx
import mlxdist
from mlxdist import train

def training(checkpoint):
    state = {"a": mx.ones(2), "b": mx.zeros(2) + 1}
    done = checkpoint.load(state) or 0
    for step in range(done + 1, 30):
        if rank == 1 and step == 7: os.kill(os.getpid(), HOW)
        mx.eval(mlxdist.all_sum(mx.ones(3)))
        state["a"] += 1  # in place: another object of Python would be a step ahead of what is saved
        state["b"][0] = step + 1
        checkpoint.save(step, state)
        state["a"] += 0.5
        mx.eval(state["a"])
        state["a"] -= 0.5
    return state
state = train.elastic(training)
print(state["a"].tolist(), state["b"].tolist(), mlxdist.init().size(), flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_the_state_is_that_of_the_last_step(how):
    """Whatever the program does to its arrays afterwards; and also where a rank has stopped."""
    variables = {"MLXDIST_TIMEOUT": "3", "MLXDIST_RENDEZVOUS_TIMEOUT": "4"} if how == "SIGSTOP" else {}
    program = "import signal\n" + KEPT.replace("HOW", f"signal.{how}")
    job = python(3, program, options=["--elastic", "1"], env=os.environ | variables, timeout=90)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"[%d] [30.0, 30.0] [30.0, 1.0] 2" % n for n in (0, 2)]


REFUSED = """
import mlx.core as mx, mlx.nn as nn
import mlxdist
from mlx.utils import tree_flatten
from mlxdist import train

def sharded(checkpoint):
    model = nn.Linear(8, 8)
    train.fully_shard(model)
    checkpoint.save(1, {"model": model})

def other(checkpoint):
    checkpoint.save(1, {"a": mx.ones(3)})
    checkpoint.load({"a": mx.ones(mlxdist.init().rank() + 3)})

def unlike(checkpoint):
    checkpoint.save(1, {"a": mx.ones(3)})
    checkpoint.load({"b": mx.ones(3)})

def aborts(checkpoint):
    if mlxdist.init().rank() == 1:
        mlxdist.init().abort("a reason")
    mlxdist.barrier()

def frozen(checkpoint):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.layers[0].freeze()
    state = {"model": model}
    checkpoint.save(1, state)
    model.load_weights([(path, array + 1) for path, array in tree_flatten(model.parameters())])
    before = dict(tree_flatten(model.parameters()))
    assert checkpoint.load(state) == checkpoint.step == 1
    for path, array in tree_flatten(model.parameters()):
        assert mx.allclose(array, before[path] - path.startswith("layers.1"), atol=1e-6), path
    print("frozen ones stay")

train.elastic(frozen, trainable_only=True)
for function in (sharded, other, unlike, aborts):
    try:
        train.elastic(function)
    except mlxdist.Error as error:
        print(function.__name__, type(error).__name__, error, flush=True)
try:
    train.elastic(other, grow_every=0)
except mlxdist.InvalidArgument as error:
    print(error)
"""


def test_what_cannot_be_elastic():
    job = python(2, REFUSED, options=["--elastic", "1"])
    assert job.returncode == 0, job.stderr
    lines = job.stdout.decode().splitlines()
    for words in (
        "frozen ones stay",
        "sharded InvalidArgument InMemoryCheckpoint.save: this rank has only a part of 'model.weight'",
        "other InvalidArgument InMemoryCheckpoint.load: 'a' is mlx.core.float32 of (4,), and saved was",
        "unlike InvalidArgument InMemoryCheckpoint.load: 'b' is mlx.core.float32 of (3,), and saved was nothing",
        "aborts Aborted ",
        "elastic: grow_every is 0; it must be a number from 1",
    ):
        assert sum(words in line for line in lines) == 2, (words, lines)
