"""One rank of test_control.py. Arguments: the scenario, and what it needs.

Prints "decision STEP stop=B save=B", and "done", which the test expects of a rank that has come to its end.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist import train

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late

scenario, *arguments = sys.argv[1:]
group = mlxdist.init()
rank, size = group.rank(), group.size()
last = size - 1


def show(decision: train.Decision) -> None:
    print(f"decision {decision.step} stop={decision.stop} save={decision.save} {decision.reason}", flush=True)


def run(control: train.Control, steps: int, act=lambda step: None, loss=lambda step: None) -> train.Decision:
    """A loop as a program has it; its last decision. ``act`` comes before each decision."""
    for step in range(steps + 1):
        act(step)
        decision = control.decide(step, loss(step))
        if decision.save or decision.stop or decision.alarm:
            show(decision)
        if decision.stop or step == steps:
            break
        mlxdist.all_sum(np.ones(10, np.float32))  # the step: ranks that part would fail in it
    mlxdist.all_sum(np.ones(3, np.float32))
    return decision


def by_signal() -> None:
    """The last rank gets the signal, in step 3; all of them stop after it."""
    number = getattr(signal, arguments[0])

    def act(step: int) -> None:
        if step == 3 and rank == last:
            os.kill(os.getpid(), number)

    with train.Control() as control:
        decision = run(control, 1000, act)
        assert (decision.step, decision.stop, decision.save) == (3, True, True), decision
        assert decision.reason == f"rank {last} received {arguments[0]}"
        assert control.decide(99) is decision  # it stays
    os.kill(os.getpid(), number)  # once more, as SLURM and the launcher do
    late(0.1)


def by_launcher() -> None:
    """The launcher gets a signal. A step takes time, and a save, too."""
    with train.Control() as control:
        for step in range(10_000):
            decision = control.decide(step)
            if decision.save:
                late(0.3)
                Path(arguments[0], f"saved-{rank}").write_text(str(step))
            if decision.stop:
                break
            mlxdist.all_sum(np.ones(10, np.float32))
            late(0.01)
            if step == 5:
                print("step 5", flush=True)
    assert decision.stop and decision.save


def kill_switch() -> None:
    path = Path(arguments[0])

    def act(step: int) -> None:
        if step == 2 and rank == 0:
            path.touch()

    with train.Control(kill_switch=path) as control:
        decision = run(control, 50, act)
        assert (decision.step, decision.save) == (2, True) and path.exists()
    with train.Control(kill_switch=path) as control:  # the next job of the queue
        decision = run(control, 50)
        assert (decision.step, decision.stop, decision.save) == (0, True, False)


def save_switch() -> None:
    path = Path(arguments[0])
    saves = []

    def act(step: int) -> None:
        if step in (4, 7) and rank == 0:
            path.touch()

    with train.Control(save_switch=str(path), save_every=5) as control:
        for step in range(12):
            act(step)
            decision = control.decide(step)
            assert not decision.stop
            if decision.save:
                saves.append(step)
            if rank == 0:
                assert not path.exists()
            mlxdist.all_sum(np.ones(10, np.float32))
    assert saves == [4, 5, 7, 10], saves


def saves_by_time() -> None:
    """By the clock of rank 0 alone, since the save before; that one may be by steps."""
    saves = []
    passed = {3: 9000, 4: 6000, 6: 1000, 8: 3500, 9: 6000}  # seconds, before the decision
    with train.Control(save_every=7, save_every_seconds=7200) as control:
        for step in range(12):
            control._started -= passed.get(step, 0) if rank == 0 else 50_000
            decision = control.decide(step)
            assert not decision.stop and not decision.reason
            if decision.save:
                saves.append(step)
            mlxdist.all_sum(np.ones(10, np.float32))
    assert saves == [3, 7, 9], saves


def duration() -> None:
    with train.Control(max_seconds=0.5) as control:
        decision = run(control, 10_000, lambda step: late(0.01))
    assert decision.stop and decision.save and "max_seconds is 0.5" in decision.reason


def slurm() -> None:
    """Rank 0's clock and environment count; the other ranks know of no end."""
    if rank == 0:
        os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 11)
    with train.Control(end_margin=10) as control:
        decision = run(control, 10_000, lambda step: late(0.01))
    assert decision.stop and decision.save and "the job's time ends in 10 s" in decision.reason, decision


def host_memory() -> None:
    """One rank allocates until the share in use is beyond the limit."""
    Path(arguments[0], "cgroup.procs").write_text(str(os.getpid()))
    kept = []

    def act(step: int) -> None:
        if step > 1 and rank == last:
            kept.append(np.ones(4 << 20, np.float64))  # 32 MiB, each page written

    mlxdist.barrier()
    with train.Control(max_host_memory=0.5, memory_every=1) as control:
        decision = run(control, 100, act)
    assert decision.stop and decision.save and "of its memory in use, and the limit is 50.0%" in decision.reason
    print(f"{len(kept)} allocations")


def device_memory() -> None:
    """MLX's own limit of 64 MiB: what has no reference any more, or is in the cache, does not count."""
    mx.set_memory_limit(64 << 20)
    kept = []

    def act(step: int) -> None:
        mx.eval(mx.ones((5 << 20,)))  # 20 MiB, gone at once
        if step == 2:
            loop = [mx.ones((4 << 20,))]  # 16 MiB, in a cycle
            loop.append(loop)
            mx.eval(loop[0])
        if step >= 4 and rank == last:
            kept.append(mx.ones((1 << 20,)))  # 4 MiB
            mx.eval(kept[-1])

    with train.Control(min_device_memory=40 << 20, memory_every=1) as control:
        decision = run(control, 100, act)
    assert decision.stop and f"the device of rank {last} has " in decision.reason, decision
    assert decision.step == 10, decision  # 7 x 4 MiB leave 36


def losses() -> None:
    """Each rank has another loss; their mean is what counts, on all of them alike."""

    def loss(step: int) -> object:
        value = 3.0 - step / 100 + (rank - (size - 1) / 2) + 100 * (step == 30 and rank == last)
        return mx.array(value) if step % 2 else value

    with train.Control(loss_alarm=train.LossAlarm(window=20)) as control:
        for step in range(40):
            decision = control.decide(step, loss(step))
            mean = 3.0 - step / 100 + 100 / size * (step == 30)
            assert abs(decision.loss - mean) < 1e-6, decision
            assert bool(decision.alarm) == (step in (30, 31)), decision
            assert not decision.stop and not decision.save
        assert np.isnan(control.decide(40).loss)
        assert np.isnan(control.decide(41, float("nan") if rank == last else 1.0).loss)


def one_collective() -> None:
    """Each decision is one all_gather, and nothing of it is in the group of the gradients."""
    with train.Control(kill_switch="/nonexistent", max_host_memory=1.0, memory_every=1) as control:
        before, own = group.stats(), control.group.stats()
        for step in range(10):
            control.decide(step, 1.0)
        after, done = group.stats(), control.group.stats()
    assert after["payload_bytes_sent"] == before["payload_bytes_sent"]
    sent = done["payload_bytes_sent"] - own["payload_bytes_sent"]
    assert sent == 10 * (size - 1) * 11 * 8, sent


def wrong() -> None:
    """Whatever one rank does wrong, all of them learn it, and the group goes on."""

    def rejected(call, text: str, kind: type = mlxdist.InvalidArgument) -> None:
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not rejected: {text}")

    own = rank == last
    before = signal.getsignal(signal.SIGTERM)
    rejected(lambda: train.Control(save_every=0 if own else 5), "save_every is 0")
    if size > 1:
        rejected(lambda: train.Control(save_every=5 + own), "disagree about the arguments", mlxdist.Mismatch)
    rejected(lambda: train.Control(save_every_seconds=-1), "save_every_seconds is -1")
    rejected(lambda: train.Control(max_host_memory=95), "max_host_memory is 95")
    rejected(lambda: train.Control(min_device_memory=1.5), "min_device_memory is 1.5")
    rejected(lambda: train.Control(end_at=float("nan")), "end_at is nan")
    rejected(lambda: train.Control(signals=[signal.SIGKILL]), "no process can handle")
    assert signal.getsignal(signal.SIGTERM) == before
    if rank == 0:
        os.environ["SLURM_JOB_END_TIME"] = "tomorrow"
    rejected(train.Control, "SLURM_JOB_END_TIME='tomorrow'")
    os.environ.pop("SLURM_JOB_END_TIME", None)
    with train.Control() as control:
        rejected(lambda: control.decide("x" if own else 0), "the step is 'x'" if own else f"rank {last} gave a step")
        rejected(lambda: control.decide(0, mx.ones(3) if own else 1.0), "loss" if own else f"rank {last} gave a step")
        if size > 1:
            rejected(lambda: control.decide(7 + own), f"rank 0 at 7, rank {last} at 8", mlxdist.Mismatch)
        assert not control.decide(0).stop
    assert signal.getsignal(signal.SIGTERM) == before


resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
globals()[scenario]()
print("done")
