"""`mlxdist launch --elastic --max-restarts` and Group.grow: lost ranks are started again, and join the others."""

import json
import random
import re
import sys

import pytest
from launching import RANK_SCRIPTS, launch, nothing_left, python  # noqa: F401

SCRIPT = RANK_SCRIPTS / "grow.py"


def grow(ranks, *losses, joined, restarts, options=()):
    """Runs the job, and returns the members in the order of their ranks at the end, after its checks."""
    elastic = ["--elastic", "1", "--max-restarts", str(restarts), *options]
    job = launch(ranks, sys.executable, str(SCRIPT), str(joined), *losses, options=elastic, timeout=90)
    assert job.returncode == 0, job.stderr
    ends = re.findall(r"\[(\d).*\] end (\d+) (\d+) \[(.*)\]", job.stdout.decode())
    ((steps, given, members),) = {end[1:] for end in ends}
    members = [int(member) for member in members.split(", ")]
    assert sorted(int(end[0]) for end in ends) == sorted(members)
    assert int(given) == 7 * int(steps)
    said = [line for line in job.stderr.decode().splitlines() if line.startswith("mlxdist launch: ")]
    assert sum(line.count("has joined again") for line in said) == joined, said
    return members


@pytest.mark.parametrize(
    ("ranks", "losses", "joined", "restarts", "members", "options"),
    [
        (3, ["1:5"], 1, 1, [0, 2, 1], []),
        pytest.param(4, ["2:5", "0:6"], 2, 2, None, ["--hosts", "localhost"], marks=pytest.mark.long),
        pytest.param(3, ["2:3", "1:4", "1:join:start"], 1, 2, None, [], marks=pytest.mark.long),
    ],
)
def test_a_lost_rank_joins_again(ranks, losses, joined, restarts, members, options):
    found = grow(ranks, *losses, joined=joined, restarts=restarts, options=options)
    assert found == members or (members is None and set(found) >= {0, ranks - 1})


def test_events(tmp_path):
    events = tmp_path / "events"
    grow(2, "0:3", joined=1, restarts=1, options=["--on-event", f"cat >> {events}; echo >> {events}"])
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["event"] for event in found] == ["started", "shrunk", "grown", "ended"]
    assert found[2]["text"] == "Rank 0 has joined again; ranks 0 and 1 go on in a group of 2, in the order 1, 0."


def test_the_others_end_while_a_process_waits():
    """It is ended, and is no failure."""
    assert grow(2, "1:5", joined=0, restarts=1) == [0]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_losses_at_random(seed):
    """Of four ranks, six processes are lost at random steps, two of them just after they have joined."""
    choice = random.Random(seed)
    losses = [f"{member}:{choice.randrange(40)}" for member in range(3)]
    losses.append(f"{choice.randrange(3)}:join:{choice.randrange(3)}")
    # Its place may be lost with the fourth process that has joined, or earlier, where the third one joins with it.
    assert len(grow(4, *losses, joined=3, restarts=9)) >= 2


def test_group_that_cannot_grow():
    program = """
import mlxdist
group = mlxdist.init()
assert group.grow() is group if group.size() == 1 else True
for call in (lambda: group.split(0).grow(), group.grow):
    try:
        call()
    except mlxdist.InvalidArgument as error:
        print(error, flush=True)
"""
    job = python(2, program)
    lines = job.stdout.decode().splitlines()
    assert sum(line.endswith("start the job with `mlxdist launch --elastic MIN`") for line in lines) == 2, job.stderr
    assert sum("grow: a group made by split() cannot go on alone" in line for line in lines) == 2
