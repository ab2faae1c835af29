"""Sums while ranks are lost and join again, until EXPECTED processes have joined, and 20 steps more.

``MEMBER:STEP`` kills one at a step, ``MEMBER:join:STEP`` the process that has taken its place, that many steps after it
has joined; with STEP "start" before. With EXPECTED 0 they end once a process waits, and do not let it join.
"""

import os
import signal
import sys

import mlx.core as mx
import numpy as np

import mlxdist

EVERY, MORE = 5, 20
expected = int(sys.argv[1])
member, joins = int(os.environ["MLXDIST_RANK"]), "MLXDIST_JOIN" in os.environ
words = [word.split(":", 1)[1] for word in sys.argv[2:] if word.startswith(f"{member}:")]
plan = [word.removeprefix("join:") for word in words if word.startswith("join:") == joins]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


if joins and "start" in plan:
    die()
group = mlxdist.init()
# What all have to know: steps, the sum of what they gave, how many have joined, and the step at which to end.
state = np.zeros(4, np.int64)


def receive_state():
    """From rank 0, which has been in the group before."""
    global members, first
    assert group is mlxdist.init() and group.size() == int(os.environ["MLXDIST_WORLD_SIZE"])
    state[:] = mlxdist.broadcast(state, root=0)
    before, members = members, mlxdist.all_gather(np.array([member])).tolist()
    assert mx.distributed.all_sum(mx.array(1), group=group.mlx).item() == group.size()
    new = mlxdist.all_gather(np.array([before is None])).sum()
    state[2] += new if new < group.size() else 0
    if before is None:
        first = int(state[0])


def end_in_time():
    """Lets all end at the same step, once all is done that is to be done."""
    waits = os.path.exists(os.environ["MLXDIST_MEMBERSHIP"].rpartition(":")[0] + ".joining")
    if not state[3] and (state[2] >= expected > 0 or (not expected and waits)):
        state[3] = state[0] + MORE
    state[:] = mlxdist.broadcast(state, root=0)


members, first = None, 0
receive_state()
while not state[3] or state[0] < state[3]:
    if str(state[0] - first) in plan:
        die()
    try:
        found = mlxdist.all_sum(mx.array([1, member])).tolist()
        assert found == [len(members), sum(members)], (found, members)
        state += [1, 7, 0, 0]
        end_in_time()
        grown = group.grow() if expected and state[0] % EVERY == 0 else group
    except mlxdist.Error:
        grown = group.shrink()
    while grown is not group:
        group = grown
        try:
            receive_state()
        except mlxdist.Error:  # another one is lost
            grown = group.shrink()
print("end", state[0], state[1], members, flush=True)
