"""Programs of mixed collectives, made up by hypothesis: changing shapes, dtypes and groups, blocking and with handles,
NumPy and MLX, 1 to 8 ranks. Every result is compared with the reference.

A program is data, so that one that fails is reduced to its shortest form and can be run again:

    ranks, algorithm (MLXDIST_ALGO), connect_at_start, faults (for mlxdist_group_inject_faults), and steps:
      {"do": "split", "group": g, "colors": [...], "keys": [...]}     one of each for every rank of the world
      {"do": "forget", "group": g}                                    no reference to these groups remains
      {"do": "burst", "groups": [...], "each": operation, ...}        the same operation in all of them, with handles
      {"do": "threads", "each": [...]}                                operations, of each group in a thread of its own
      {"do": "inject", "faults": "..."}                               from here on, on all ranks
      {"do": operation, "group": g, "how": ..., ...}

What the main thread has handed to MLX (how: async) goes on beside operations of other groups that are carried out at
once.
"""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OPERATIONS = [
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "all_to_all_v", "send", "sendrecv", "barrier",
]  # fmt: skip
DTYPES = ["float32", "float16", "bfloat16", "int8", "int64", "uint16", "bool", "complex64"]
# Up to a message, to what may be sent unasked, and more.
# What an unreliable device does, and results are right all the same (providers/soft/emulation/fault_injection.h).
FAULTS = [
    "none", "drop=1/200", "duplicate=1/200", "truncate=1/200", "drop=1/200,duplicate=1/200", "error=1/400",
    "jitter=300",
    "drop_after=20", "error_after=20", "lose=1/400",
]  # fmt: skip
ROWS = [1, 0, 3, 100, 992, 993, 9000, 40_000, 100_000]


def operation(random, groups, ways=("at once", "handle", "in place", "mlx", "async")):
    how = random.choice(ways)
    return {
        "do": random.choice(OPERATIONS),
        "group": random.choice(groups),
        "how": how,
        "wait_after": random.randint(1, 8) if how in ("handle", "async") else 0,
        "dtype": random.choice(DTYPES),
        "op": random.choice(["sum", "max", "min", "prod"]),
        "root": random.randint(0, 7),
        "rows": random.choice(ROWS),
        "row": random.choice([[], [1], [2, 3]]),
    }


def make_steps(random, ranks, count, faults=()):
    steps, groups, made = [], [0], 1
    for _ in range(count):
        kind = random.choice(["operation"] * 8 + ["burst", "threads", "split", "forget"] + ["inject"] * bool(faults))
        if kind == "split" and len(groups) < 5:
            colors, keys = ([random.randint(-1, most) for _ in range(ranks)] for most in (2, 3))
            steps.append({"do": "split", "group": random.choice(groups), "colors": colors, "keys": keys})
            groups.append(made)
            made += 1
        elif kind == "forget" and len(groups) > 1:
            steps.append({"do": "forget", "group": groups.pop(random.randint(1, len(groups) - 1))})
        elif kind == "threads":
            each = [operation(random, groups) for _ in range(random.randint(1, 8))]
            steps.append({"do": "threads", "each": each})
        elif kind == "inject":
            steps.append({"do": "inject", "faults": random.choice(faults)})
        else:
            step = operation(random, groups)
            if kind == "burst":
                step |= {"do": "burst", "each": random.choice(OPERATIONS[:-1]), "groups": list(groups)}
                step["dtype"] = random.choice(DTYPES)
            steps.append(step)
    return steps


@st.composite
def programs(draw):
    ranks = draw(st.integers(1, 8))
    return {
        "ranks": ranks,
        "algorithm": draw(st.sampled_from(["auto", "auto", "direct", "mesh", "ring", "recursive_doubling", "tree"])),
        "connect_at_start": draw(st.sampled_from([8, 8, 8, 1])),
        "faults": draw(st.sampled_from(["", "", "", "drop=1/100,duplicate=1/100"])) if ranks > 1 else "",
        "steps": make_steps(draw(st.randoms(use_true_random=False)), ranks, draw(st.integers(1, 25))),
    }


def check(run_ranks, directory, program, seconds=40):
    file = directory / "program.json"
    file.write_text(json.dumps(program, indent=1))
    environment = {
        "MLXDIST_ALGO": program["algorithm"],
        "MLXDIST_ON_DEMAND_THRESHOLD": str(program["connect_at_start"]),
    }
    outputs = run_ranks("sequences.py", program["ranks"], file, timeout=seconds, environment=environment)
    assert all(f"{len(program['steps'])} steps are exact" in output for output in outputs)


FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=FIXTURES)
@given(program=programs())
def test_programs(run_ranks, tmp_path, program):
    """Always the same few."""
    check(run_ranks, tmp_path, program)


@pytest.mark.long
@settings(max_examples=40, deadline=None, print_blob=True, suppress_health_check=FIXTURES)
@given(program=programs())
def test_many_programs(run_ranks, tmp_path, program):
    """Others each time."""
    check(run_ranks, tmp_path, program)


@pytest.mark.long
@pytest.mark.parametrize("seed, ranks, faults", [(1, 2, FAULTS), (2, 3, FAULTS), (3, 4, ())])
def test_soak(run_ranks, tmp_path, seed, ranks, faults):
    """Hundreds of steps in one job: overlapping groups, at once and with handles, lazy, evaluated meanwhile, all of
    these also in threads, while faults of all kinds come and go."""
    steps = make_steps(random.Random(seed), ranks, 300, faults)
    program = {"ranks": ranks, "algorithm": "auto", "connect_at_start": 8, "faults": "", "steps": steps}
    check(run_ranks, tmp_path, program, seconds=120)
