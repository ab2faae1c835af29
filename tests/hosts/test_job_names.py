"""How commands name a job: whole or by its beginning, where it runs, has failed, or was started again."""

import shutil

import pytest
from click.testing import CliRunner
from launching import nothing_left  # noqa: F401  (a fixture of every test)

from mlxdist.base.errors import InvalidArgument
from mlxdist.cli.dump import dump
from mlxdist.cli.stop import stop
from mlxdist.cli.top import top
from mlxdist.cluster.hostfile.hosts import Host, Hostfile
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.launch.jobs import JobDirectory, exact_job, find_job, running_job
from mlxdist.launch.runtime_directory import runtime_directory
from mlxdist.tools.observe.collect import JobRanks, find_ranks, respond


@pytest.fixture
def restarted(tmp_path):
    """Job ``ab`` has failed and left recordings, ``ab-1`` that came after it runs: this process is its launcher."""
    (runtime_directory() / "ab" / "flight").mkdir(parents=True)
    directory = JobDirectory.of_ranks("ab-1", tmp_path / "temporary", ["true"])
    yield
    directory.close()
    shutil.rmtree(directory.path)
    shutil.rmtree(runtime_directory() / "ab")


def test_a_job_that_failed_is_not_taken_for_its_restart(restarted):
    assert (find_job("ab").name, find_job("ab").pids, find_job("a").name, find_job().name) == ("ab", {}, "ab-1", "ab-1")
    assert (exact_job("ab").name, exact_job("a")) == ("ab", None)
    assert running_job("ab").name == "ab-1", "what is to be stopped runs"
    with pytest.raises(InvalidArgument, match="there is no job ''"):
        running_job("")


def test_nor_on_hosts(restarted):
    here = HostSelection(Hostfile((Host("localhost"),)))
    for name, found in {"ab": "ab", "a": "ab-1"}.items():
        with find_ranks(name, here) as ranks:
            assert ranks.job == found
            assert ranks.collect(full=False, seconds=0.1).ended == (found == "ab")


@pytest.mark.parametrize("source", ["rendezvous", "signal"])
def test_a_request_for_a_job_that_has_ended_never_gets_its_restart(restarted, source):
    shutil.rmtree(runtime_directory() / "ab" / "flight")
    response = respond("ab", source, 0.1)
    assert response["ended"] and response["records"] == [] and "there is no job 'ab' here" in response["notes"][0]
    found = JobRanks("ab").collect(full=source == "signal", seconds=0.1)
    assert found.ended and found.records == {} and "there is no job 'ab' here" in found.notes[0]


@pytest.mark.parametrize("command", [stop, dump, top])
def test_an_empty_name_is_rejected(command):
    """The variable of a script that was never set: it would be the beginning of every name."""
    refused = CliRunner().invoke(command, [""])
    assert refused.exit_code == 2 and "the name is empty; `mlxdist ps` lists the jobs" in refused.output
