"""A tuning table where ranks are on several hosts: its rows are for a number of ranks and of hosts."""

import pytest

from mlxdist.base import tuning_file
from mlxdist.runtime.group import tuning
from mlxdist.runtime.group.tuning import MAX_BYTES, Row

SUMS = "direct mesh ring recursive_doubling tree"
TABLE = [
    Row("all_reduce", 2, 1, MAX_BYTES, "ring"),
    Row("all_reduce", 2, 2, MAX_BYTES, "tree"),
    Row("all_reduce", 4, 1, MAX_BYTES, "recursive_doubling"),
    Row("all_reduce", 4, 2, MAX_BYTES, "mesh"),
]


def printed(run_ranks, tmp_path, hosts):
    """The lines that rank 0 prints, by their first words."""
    path = tmp_path / "tuning.json"
    tuning_file.update(path, tuning.sections(tuning.Tuning(TABLE)))
    outputs = run_ranks("tuned_hosts.py", len(hosts), *hosts, environment={"MLXDIST_TUNING_FILE": str(path)})
    return dict(line.split(":", 1) for line in outputs[0].splitlines())


@pytest.mark.long
def test_two_hosts(run_ranks, tmp_path):
    """A group of ranks of one host has the rows of one; the tuner measures the hierarchy where there is one."""
    found = printed(run_ranks, tmp_path, "0011")
    assert found["decided"] == " mesh ring tree"
    assert found["all_reduce"] == f" {SUMS} hierarchical" and found["all_gather"] == " direct ring hierarchical"
    assert found["all_to_all"] == " direct hierarchical"
    assert found["rows"] == " all_gather all_reduce all_to_all barrier (4, 2)"


@pytest.mark.long
def test_one_host(run_ranks, tmp_path):
    """An operation with one algorithm there has no row."""
    found = printed(run_ranks, tmp_path, "0000")
    assert found["decided"] == " recursive_doubling recursive_doubling none"
    assert found["all_reduce"] == f" {SUMS}" and found["all_to_all"] == ""
    assert found["rows"] == " all_gather all_reduce barrier (4, 1)"


@pytest.mark.long
def test_uneven_hosts(run_ranks, tmp_path):
    """Two hosts, and no hierarchy; no row is for three ranks."""
    found = printed(run_ranks, tmp_path, "0001")
    assert found["decided"] == " mesh direct tree" and found["all_reduce"] == f" {SUMS}"
    assert found["rows"] == " all_gather all_reduce barrier (4, 2)"
