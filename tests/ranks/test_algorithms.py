"""Every algorithm by itself: exact in the order in which it reduces, the same on every rank and in every run."""

import os
import re

import pytest

_runs: dict[tuple[str, int], list[str]] = {}
MANY = [pytest.param(ranks, marks=pytest.mark.long) for ranks in (4, 5, 8)]


@pytest.fixture
def a_run(run_ranks):
    """A function that returns what the ranks of one run print: the first test that asks for it makes the run."""

    def run(algorithm: str, ranks: int) -> list[str]:
        if (algorithm, ranks) not in _runs:
            _runs[algorithm, ranks] = run_ranks("algorithms.py", ranks, environment={"MLXDIST_ALGO": algorithm})
        return _runs[algorithm, ranks]

    return run


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, *MANY])
@pytest.mark.parametrize("algorithm", ["direct", "mesh", "ring", "recursive_doubling", "tree"])
def test_exact_in_its_own_order(a_run, algorithm, ranks):
    exact_in(a_run(algorithm, ranks), algorithm)


def exact_in(outputs, algorithm):
    """The operations in which all ranks found the algorithm exact, with the same results."""
    pattern = f"^{algorithm} is exact in ([a-z_ ]+); ([0-9a-f]+)$"
    found = [re.search(pattern, output, re.MULTILINE) for output in outputs]
    assert all(found), outputs
    assert len({match[2] for match in found}) == 1, "the ranks have different results"
    return found[0][1]


@pytest.mark.parametrize(
    "hosts",
    [
        "0011",
        pytest.param("0101", marks=pytest.mark.long),
        pytest.param("001122", marks=pytest.mark.long),
        pytest.param("210012", marks=pytest.mark.long),
        pytest.param("000111", marks=pytest.mark.long),
        pytest.param("00112233", marks=pytest.mark.long),
    ],
)
def test_within_hosts_then_between_them(run_ranks, hosts):
    """Two to four virtual hosts, with two or three ranks each, whose numbers may be in any order."""
    outputs = run_ranks("algorithms.py", len(hosts), *hosts, environment={"MLXDIST_ALGO": "hierarchical"})
    assert exact_in(outputs, "hierarchical") == "all_sum all_gather reduce_scatter all_to_all"


@pytest.mark.parametrize("hosts", ["0011", pytest.param("210012", marks=pytest.mark.long)])
@pytest.mark.parametrize("algorithm, each", [("direct", 1), ("hierarchical", 2)])
def test_messages_of_all_to_all_between_hosts(run_ranks, tmp_path, hosts, algorithm, each):
    """Two ranks on a host: direct has a message to each rank elsewhere, the hierarchy one of twice the bytes a host."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os; os.environ['MLXDIST_EMULATED_NODE'] = '{hosts}'[int(os.environ['MLXDIST_RANK'])]\n"
        f"import numpy as np, mlxdist; mlxdist.init(); mlxdist.all_to_all(np.ones({len(hosts)}, np.int64))\n"
    )
    log = {"MLXDIST_DEBUG": "trace:message", "MLXDIST_DEBUG_FILE": str(tmp_path / "%r.log")}
    run_ranks(program, len(hosts), environment=log | {"MLXDIST_ALGO": algorithm})
    for rank, host in enumerate(hosts):
        sent = re.findall(r": to rank (\d+): .*, ([1-9]\d*) bytes", (tmp_path / f"{rank}.log").read_text())
        others = [(to, int(size)) for to, size in sent if hosts[int(to)] != host]
        reached = [hosts[int(to)] for to, _ in others]
        assert sorted(reached) == sorted([*set(hosts) - {host}] * (2 // each)), others
        assert {size for _, size in others} == {8 * each}, others


@pytest.mark.parametrize("hosts", ["001", "0000", "01", "00012"])
def test_hosts_that_make_no_hierarchy(run_ranks, tmp_path, hosts):
    """Not all have as many ranks, or there are none beside each other: the operations' own choice remains."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os; os.environ['MLXDIST_EMULATED_NODE'] = '{hosts}'[int(os.environ['MLXDIST_RANK'])]\n"
        "import mlxdist; group = mlxdist.init(); print(group.algorithm('all_sum', 1 << 20))\n"
    )
    outputs = run_ranks(program, len(hosts), environment={"MLXDIST_ALGO": "hierarchical"})
    assert {output.split()[-1] for output in outputs} == {"direct" if len(hosts) == 2 else "mesh"}


def test_hierarchy_by_default(run_ranks, tmp_path):
    """Above 32 KiB, where it has fewer bytes between hosts; an all_to_all up to there, where it has fewer messages."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os; os.environ['MLXDIST_EMULATED_NODE'] = '0011'[int(os.environ['MLXDIST_RANK'])]\n"
        "import mlxdist; group = mlxdist.init()\n"
        "print(*[group.algorithm(name, size) for name in ('all_gather', 'all_to_all') for size in (32768, 32772)])\n"
    )
    (first, *others) = run_ranks(program, 4)
    assert first.splitlines()[-1].split() == ["direct", "hierarchical", "hierarchical", "direct"]
    assert {output.splitlines()[-1] for output in others} == {first.splitlines()[-1]}


@pytest.mark.parametrize(
    "algorithm", ["ring", *(pytest.param(other, marks=pytest.mark.long) for other in ("mesh", "recursive_doubling"))]
)
def test_same_in_every_run(run_ranks, a_run, algorithm):
    outputs = [a_run(algorithm, 3), run_ranks("algorithms.py", 3, environment={"MLXDIST_ALGO": algorithm})]
    assert outputs[0] == outputs[1] and all(algorithm in output for output in outputs[0])


@pytest.mark.parametrize(
    "operation, odd, even",
    [
        ("all_sum", "ring", "mesh"),
        ("all_gather", "direct", "ring"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("all_sum", "direct", "recursive_doubling"),
                ("reduce_scatter", "ring", "direct"),
                ("broadcast", "tree", "ring"),
                ("reduce", "tree", "mesh"),
            )
        ),
    ],
)
def test_ranks_with_different_algorithms_are_reported(run_ranks, operation, odd, even):
    outputs = run_ranks("algorithms_differ.py", 3, operation, odd, even, status=1)
    assert all("Mismatch: ranks disagree" in output for output in outputs), outputs
    # The rank that noticed has reported it to all others. Where one rank waits for another outside of it, the error can
    # only name a possible cause.
    assert all("MLXDIST_ALGO" in output for output in outputs), outputs


def crowded(run_ranks, *cores):
    """What ranks bound to these cores choose for a small all_sum."""
    return set("".join(run_ranks("crowded.py", len(cores), *cores)).split())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not bound to cores here")
def test_more_ranks_than_cores(run_ranks):
    """Few messages in all."""
    core = str(min(os.sched_getaffinity(0)))
    assert crowded(run_ranks, *[core] * 5) == {"tree"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not bound to cores here")
def test_a_core_for_each_rank(run_ranks):
    """All ranks count the cores of all: what one of them may use is no measure."""
    cores = sorted(map(str, os.sched_getaffinity(0)))
    if len(cores) < 5:
        pytest.skip("this machine has too few cores")
    assert crowded(run_ranks, *cores[:5]) == {"direct"}
