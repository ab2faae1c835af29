"""Programs of mixed collectives, made up by hypothesis: changing shapes, dtypes and groups, blocking and with handles,
NumPy and MLX, 1 to 8 ranks. Every result is compared with the reference.

A program is data, so that one that fails is reduced to its shortest form and can be run again:

    ranks, algorithm (MLXDIST_ALGO), connect_at_start, faults (for mlxdist_group_inject), and steps:
      {"do": "split", "group": g, "colors": [...], "keys": [...]}     one of each for every rank of the world
      {"do": "forget", "group": g}                                    nobody holds on to these groups any more
      {"do": "burst", "groups": [...], "each": operation, ...}        the same operation in all of them, with handles
      {"do": operation, "group": g, "how": ..., ...}
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OPERATIONS = [
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "all_to_all_v", "sendrecv", "barrier",
]  # fmt: skip
DTYPES = ["float32", "float16", "bfloat16", "int8", "int64", "uint16", "bool", "complex64"]
# Up to a message, to what may be sent unasked, and more.
ROWS = [1, 0, 3, 100, 992, 993, 9000, 40_000, 100_000]


@st.composite
def operation(draw, groups):
    how = draw(st.sampled_from(["at once", "handle", "in place", "mlx"]))
    return {
        "do": draw(st.sampled_from(OPERATIONS)),
        "group": draw(st.sampled_from(groups)),
        "how": how,
        "wait_after": draw(st.integers(1, 8)) if how == "handle" else 0,
        "dtype": draw(st.sampled_from(DTYPES[:1] + ["int32"] if how == "mlx" else DTYPES)),
        "op": draw(st.sampled_from(["sum", "max", "min", "prod"])),
        "root": draw(st.integers(0, 7)),
        "rows": draw(st.sampled_from(ROWS)),
        "row": draw(st.sampled_from([[], [1], [2, 3]])),
    }


@st.composite
def programs(draw):
    ranks = draw(st.integers(1, 8))
    steps, groups, made = [], [0], 1
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["operation"] * 8 + ["burst", "split", "forget"]))
        if kind == "split" and len(groups) < 5:
            steps.append(
                {
                    "do": "split",
                    "group": draw(st.sampled_from(groups)),
                    "colors": draw(st.lists(st.integers(-1, 2), min_size=ranks, max_size=ranks)),
                    "keys": draw(st.lists(st.integers(-1, 3), min_size=ranks, max_size=ranks)),
                }
            )
            groups.append(made)
            made += 1
        elif kind == "forget" and len(groups) > 1:
            steps.append({"do": "forget", "group": groups.pop(draw(st.integers(1, len(groups) - 1)))})
        else:
            step = draw(operation(groups))
            if kind == "burst":
                step |= {"do": "burst", "each": draw(st.sampled_from(OPERATIONS[:-1])), "groups": list(groups)}
                step["dtype"] = draw(st.sampled_from(DTYPES))
            steps.append(step)
    return {
        "ranks": ranks,
        "algorithm": draw(st.sampled_from(["auto", "auto", "direct", "mesh", "ring", "doubling", "tree"])),
        "connect_at_start": draw(st.sampled_from([8, 8, 8, 1])),
        "faults": draw(st.sampled_from(["", "", "", "drop=1/100,duplicate=1/100"])) if ranks > 1 else "",
        "steps": steps,
    }


def check(run_ranks, folder, program):
    file = folder / "program.json"
    file.write_text(json.dumps(program, indent=1))
    environment = {
        "MLXDIST_ALGO": program["algorithm"],
        "MLXDIST_CONNECT_AT_START": str(program["connect_at_start"]),
    }
    outputs = run_ranks("sequences.py", program["ranks"], file, timeout=40, environment=environment)
    assert all(f"{len(program['steps'])} steps are exact" in output for output in outputs)


FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=FIXTURES)
@given(program=programs())
def test_programs(run_ranks, tmp_path, program):
    """Always the same few."""
    check(run_ranks, tmp_path, program)


@pytest.mark.long
@settings(max_examples=100, deadline=None, print_blob=True, suppress_health_check=FIXTURES)
@given(program=programs())
def test_many_programs(run_ranks, tmp_path, program):
    """Others each time."""
    check(run_ranks, tmp_path, program)
