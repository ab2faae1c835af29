"""How fast training is: tokens, FLOPs and their share of the peak, communication, memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument, Mismatch
from mlxdist.cluster.hostfile.rank_shares import measured_hosts
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group, GroupLike, engine_of
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather

from .flops import FlopsPerToken

__all__ = ["Throughput"]

_COUNTERS = ("collectives", "point_to_point", "operation_ns", "wait_ns")
_MAX_HOST_BYTES = 256


@dataclass
class Step:
    """A step that is measured.

    Attributes:
        tokens: of all ranks together.
        computed: how many tokens the model has computed for them, on all ranks together, prompts that are no targets
            included; ``None``: ``tokens``.
        flops: of one of these tokens; ``None``: those that were given for all steps.
    """

    tokens: int
    computed: float | None = None
    flops: FlopsPerToken | None = None


class Throughput:
    """Measures steps, and reports rates under the names that mlx-lm's trainer has for them, and more.

        throughput = train.Throughput(train.flops_per_token(model, sequence_length))
        for iteration, batch in enumerate(batches, 1):
            with throughput.step(tokens=batch_size * sequence_length):
                loss, gradients = loss_and_gradients(model, batch)
                optimizer.update(model, train.average_gradients(gradients))
                mx.eval(loss, model.parameters(), optimizer.state)
            if iteration % 10 == 0:
                report = throughput.report()

    MFU, the model FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311), is the model's computation as a share of
    the hosts' peak; HFU, the hardware FLOPs utilization (Korthikanti et al. 2022, arXiv:2205.05198), also counts the
    computation that gradient checkpointing repeats. The peak of a host is the fastest matrix product that `mlxdist
    calibrate` has measured there, of any dtype, in rank 0's tuning file: under the name of the host, or "localhost" for
    that of rank 0. Ranks of one host share its peak. Where a host is not measured, a report has neither.

    Args:
        flops_per_token: of :func:`flops_per_token`, for the full model; ``None`` leaves TFLOPS, MFU and HFU out.
        peak_tflops: of all hosts of the group together, in place of what has been measured, in 10^12 operations a
            second.
        recompute: which share of the forward pass is carried out once more in the backward pass: 1 with all layers
            checkpointed.
        group: all ranks that train; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: an argument is no such number, or the tuning file is malformed; the same on all ranks.
        Mismatch: the ranks have different ones.
    """

    def __init__(
        self,
        flops_per_token: FlopsPerToken | None = None,
        *,
        peak_tflops: float | None = None,
        recompute: float = 0.0,
        group: GroupLike | None = None,
    ) -> None:
        self._group = group_of(group)
        with agreed("Throughput", self._group, flops_per_token, peak_tflops, recompute):
            if not (flops_per_token is None or isinstance(flops_per_token, FlopsPerToken)):
                raise InvalidArgument(f"Throughput: flops_per_token is {flops_per_token!r:.50}, not a FlopsPerToken")
            if not 0 <= recompute <= 1:
                raise InvalidArgument(f"Throughput: recompute is {recompute!r:.50}, not a share from 0 to 1")
            if peak_tflops is not None and not 0 < peak_tflops < float("inf"):
                raise InvalidArgument(f"Throughput: peak_tflops is {peak_tflops!r:.50}, not a number above 0")
            measured = _measured_here(self._group) if peak_tflops is None else {}
        self._flops, self._recompute = flops_per_token, recompute
        self._peak_tflops = _measured_peak(self._group, measured) if peak_tflops is None else peak_tflops
        self._compute_seconds: float | None = None
        self._trained_tokens = 0
        self._begin()

    @property
    def peak_tflops(self) -> float | None:
        """The peak of all hosts together, in 10^12 operations a second; ``None`` if one is not measured."""
        return self._peak_tflops

    @contextmanager
    def step(self, tokens: int = 0) -> Iterator["Step"]:
        """Measures the body of a ``with`` statement as one step, which has to evaluate what it computes.

        Time outside the statement, such as for a checkpoint or an evaluation, does not count.

        Args:
            tokens: of the step, on all ranks together; those that several ranks process in parts count once. Where only
                the step itself finds them, its body sets ``tokens`` of what the statement gives.

        Raises:
            InvalidArgument: ``tokens`` is no number from 0.
        """
        measured = Step(tokens)
        before, start = self._counters(), time.perf_counter_ns()
        yield measured
        tokens = measured.tokens
        if type(tokens) is not int or tokens < 0:
            raise InvalidArgument(f"Throughput.step: tokens is {tokens!r:.50}, not a number from 0")
        self._nanoseconds += time.perf_counter_ns() - start
        self._counted += np.maximum(self._counters() - before, 0)  # 0: a group has gone meanwhile
        self._steps += 1
        self._tokens += tokens
        if self._flops is not None:
            flops = measured.flops or self._flops
            computed = tokens if measured.computed is None else measured.computed
            self._computed += computed * np.array([flops.total, flops.total + self._recompute * flops.forward])

    def measure_compute(self, step: Callable[[], object], repeats: int = 3) -> float:
        """Seconds that the computation of a step takes: with them, reports say how much communication is hidden.

        Args:
            step: computes and evaluates all that a step does, of the same sizes, and communicates nothing. It is called
                once more than measured; what it changes the caller restores.
            repeats: calls that are measured, from 1. The shortest counts.

        Raises:
            InvalidArgument: ``step`` communicates; ``repeats`` is no number from 1.
        """
        if type(repeats) is not int or repeats < 1:
            raise InvalidArgument(f"Throughput.measure_compute: repeats is {repeats!r:.50}, not a number from 1")
        before, seconds = self._counters(), []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        if operations := int((self._counters() - before)[:2].sum()):
            raise InvalidArgument(f"Throughput.measure_compute: step has carried out {operations} operations of groups")
        self._compute_seconds = min(seconds[1:])
        return self._compute_seconds

    def report(self) -> dict[str, float]:
        """Reports on the steps since the last report. Collective: one all_gather of 56 bytes a rank.

        Returns, the same on all ranks:
            iterations_per_second, tokens_per_second: by the slowest rank's time.
            trained_tokens: since the beginning.
            peak_memory: of MLX in the process so far, in GB of 10^9 bytes, on the rank with the most.
            communication, waiting: which share of their time the ranks were in operations of groups, and which they
                waited in these for others, on average. Operations that overlap count each. Waiting is part of it.
            communication_exposed, communication_hidden: the parts of ``communication`` by which a step was longer than
                the computation of :meth:`measure_compute`, and the other. Only where all ranks have measured that.
            tflops: model FLOPs of all ranks together, in 10^12 a second.
            mfu, hfu: shares of the peak.

        Raises:
            InvalidArgument: there was no step.
            Mismatch: the ranks had other numbers of steps or tokens.
        """
        compute = self._compute_seconds or 0.0
        own = [self._steps, self._tokens, self._nanoseconds, *self._counted[2:], mx.get_peak_memory()]
        rows = _gathered(np.array([*own, int(compute * 1e9)], np.int64), self._group).astype(np.float64)
        steps, tokens, nanoseconds, operations, waits, memory, computing = rows.T
        for rank, row in enumerate(rows[:, :2]):
            if not np.array_equal(row, rows[0, :2]):
                counts = [f"{steps:.0f} steps of {tokens:.0f} tokens" for steps, tokens in (rows[0, :2], row)]
                raise Mismatch(f"Throughput.report: rank 0 had {counts[0]}, and rank {rank} had {counts[1]}")
        if steps[0] == 0:
            raise InvalidArgument("Throughput.report: there was no step since the last report")
        self._trained_tokens += self._tokens
        computed = self._computed
        self._begin()
        seconds = nanoseconds.max() / 1e9
        found = {
            "iterations_per_second": steps[0] / seconds,
            "tokens_per_second": tokens[0] / seconds,
            "trained_tokens": self._trained_tokens,
            "peak_memory": memory.max() / 1e9,
            "communication": (operations / nanoseconds).mean(),
            "waiting": (waits / nanoseconds).mean(),
        }
        if computing.all():
            exposed = np.clip(nanoseconds - steps * computing, 0, operations)
            found["communication_exposed"] = (exposed / nanoseconds).mean()
            found["communication_hidden"] = found["communication"] - found["communication_exposed"]
        if self._flops is not None:
            model, hardware = computed / seconds / 1e12
            found["tflops"] = model
            if self._peak_tflops is not None:
                found |= {"mfu": model / self._peak_tflops, "hfu": hardware / self._peak_tflops}
        return {name: value if type(value) is int else float(value) for name, value in found.items()}

    def _begin(self) -> None:
        self._steps = self._tokens = self._nanoseconds = 0
        self._counted = np.zeros(len(_COUNTERS), np.int64)
        self._computed = np.zeros(2)  # FLOPs of the model, and with those that are repeated

    def _counters(self) -> np.ndarray:
        """The counters of all groups of this process together."""
        stats = engine_of(self._group).world.counters()
        return np.array([stats.get(name, 0) for name in _COUNTERS], np.int64)


def _gathered(own: np.ndarray, group: Group) -> np.ndarray:
    """All ranks' rows. MLX gathers them, in order with the operations that ``mx.async_eval`` has started."""
    return own[None] if group.size() == 1 else np.array(all_gather(mx.array(own[None]), group=group))


def _measured_here(group: Group) -> dict[str, float]:
    """The TFLOPS of hosts in rank 0's tuning file, by the first label of their names; empty on other ranks."""
    if group.rank() > 0:
        return {}
    found = {_label(name): host.tflops for name, host in measured_hosts().items()}
    return {_label(engine_of(group).world.host): found["localhost"]} | found if "localhost" in found else found


def _measured_peak(group: Group, measured: dict[str, float]) -> float | None:
    """TFLOPS of the hosts of all ranks by rank 0's ``measured``; ``None`` if one is not measured."""
    own = _label(engine_of(group).world.host).encode()[:_MAX_HOST_BYTES]
    rows = _gathered(np.frombuffer(own.ljust(_MAX_HOST_BYTES, b"\0"), np.uint8), group)
    hosts = {row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows}
    known = sum(measured[host] for host in hosts) if hosts <= measured.keys() else 0.0
    megaflops = _gathered(np.array([round(known * 1e6)], np.int64), group)[0, 0]
    return float(megaflops) / 1e6 or None


def _label(name: str) -> str:
    """The first label of a host's name, in lower case: "studio" for "me@Studio.local"."""
    return name.rpartition("@")[2].partition(".")[0].lower()
