"""Sums of rank numbers while ranks are lost: ``MEMBER:STEP`` kills one; ``MEMBER:STEP:WHERE`` elsewhere than in a step.

WHERE is "shrink": it dies once it has asked for the next epoch; "stop": it stops; "wait": it waits, and does no more
steps; "fails": an exception ends it.
"""

import os
import signal
import socket
import sys

import mlx.core as mx
import numpy as np

import mlxdist

STEPS = 24
group = mlxdist.init(timeout=20)
member, members = group.rank(), list(range(group.size()))
plan = {}
for word in sys.argv[1:]:
    who, step, *where = word.split(":")
    plan[int(who)] = (int(step), where[0] if where else "kill")


def check(group, members):
    """All operations of MLX and mlxdist, in the group and in what is made of it."""
    assert group is mlxdist.init() and group.timeout == 20
    assert mlxdist.all_gather(np.array([member]), group=group).tolist() == members
    x = mx.arange(100_000) + member
    assert mx.array_equal(mlxdist.all_sum(x), len(members) * mx.arange(100_000) + sum(members)).item()
    assert mx.distributed.all_sum(mx.array(1.0), group=group.mlx).item() == len(members)
    half = group.split(group.rank() % 2)
    assert mlxdist.all_gather(np.array([member]), group=half).tolist() == members[group.rank() % 2 :: 2]
    mesh = mlxdist.mesh(dp=-1)
    assert mlxdist.all_sum(mx.array(member), group=mesh["dp"]).item() == sum(members)
    assert mlxdist.all_sum(np.ones(3), group=group.lane("another")).tolist() == [len(members)] * 3
    registered = group.register(np.zeros(1 << 20, np.uint8))
    registered.release()


def die(where):
    if where == "shrink":  # as an answer that comes too late for it
        connect = socket.socket.connect

        def connect_and_die(self, address):
            connect(self, address)
            if self.family == socket.AF_UNIX:
                sendall = self.sendall
                self.sendall = lambda data: (sendall(data), os.kill(os.getpid(), signal.SIGKILL))

        socket.socket = type("socket", (socket.socket,), {"connect": connect_and_die, "__slots__": ("sendall",)})
        return
    if where == "fails":
        raise SystemExit(3)
    if where == "wait":
        print("waits", flush=True)
        signal.pause()
    os.kill(os.getpid(), signal.SIGSTOP if where == "stop" else signal.SIGKILL)


check(group, members)
step = 0
while step < STEPS:
    try:
        if member in plan and step == plan[member][0]:
            die(plan.pop(member)[1])
        total = mlxdist.all_sum(mx.array([member, step], dtype=mx.int64)).tolist()
        assert total == [sum(members), len(members) * step], (total, members, step)
        step += 1
    except mlxdist.Error:
        old, group = group, group.shrink()
        found = mlxdist.all_gather(np.array([member, step])).reshape(-1, 2)
        assert set(found[:, 0]) < set(members) and member in found[:, 0]
        assert int(found[:, 1].max() - found[:, 1].min()) <= 1, "a rank is at most one operation ahead"
        members, step = found[:, 0].tolist(), int(found[:, 1].min())
        check(group, members)
        for call in (old.barrier, old.shrink, lambda: old.mlx, lambda: old.split(0)):
            try:
                call()
                raise AssertionError("the old group is over")
            except mlxdist.InvalidArgument:
                continue
print("left", members, "with", int(os.environ["MLXDIST_EPOCH"]), "epochs as rank", group.rank(), flush=True)
