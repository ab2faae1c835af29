"""`mlxdist pull --only-shards`: what arrives, what is loaded from it, and what is refused."""

import pytest
from click.testing import CliRunner

from mlxdist.cli import commands


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "scenario",
    [
        *("tensor_parallel", "stages", "experts", "refused", "resumed", "whole_afterwards", "several_ranks_on_a_host"),
        *("in_the_cache_of_the_hub", "computed", "full_disk", "other_plan"),
    ],
)
def test_hosts_with_shards_alone(run_scenarios, ranks, scenario, tmp_path):
    run_scenarios("pull_shards.py", ranks, scenario, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_another_plan_that_is_interrupted(run_scenarios, ranks, tmp_path):
    run_scenarios("pull_shards.py", ranks, "interrupted", tmp_path, resident=False)
    run_scenarios("pull_shards.py", ranks, "goes_on", tmp_path)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("org/tiny", "--only-shards"), "--only-shards is for several hosts; one host reads all of a model"),
        (("org/tiny", "--pipeline"), "--pipeline is for --only-shards"),
        (("org/tiny", "--rank-shares", "2,1"), "--rank-shares is for --only-shards"),
        (("org/tiny", "-n", "2"), "-n is for --only-shards"),
    ],
)
def test_options_that_do_not_fit(words, problem):
    result = CliRunner().invoke(commands, ["pull", *words])
    assert result.exit_code != 0 and problem in f"{' '.join(result.output.split())} {result.exception}", result
