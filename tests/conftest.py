"""What the tests share: `run_ranks`, which runs a script of tests/rank_scripts under `mlxdist launch`."""

import os
import random
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RANK_SCRIPTS = Path(__file__).parent / "rank_scripts"
_PREFIX = re.compile(r"\[ *(\d+)\] ?")


def pytest_configure() -> None:
    """In a shell's background job Ctrl-C is ignored, under nohup SIGHUP, by all that the tests start, too; they send
    both on purpose."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run 1 of N long tests of each file")
    parser.addoption("--choice", default="", help="chooses them: another text, such as a commit, takes others")
    parser.addoption("--soak", type=float, default=60, metavar="SECONDS", help="how long a server is under load")


@pytest.hookimpl(trylast=True)  # what -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All long tests take hours of two cores: CI runs a part of each file's, over many commits all of them."""
    of_file: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long"):
            of_file[item.path].append(item)
    left_out: set[pytest.Item] = set()
    for file, tests in of_file.items():
        count = -(-len(tests) // config.getoption("--one-in"))
        left_out |= set(tests) - set(random.Random(config.getoption("--choice") + file.name).sample(tests, count))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What killed processes leave there, such as protection domains in use, must not meet the next session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture
def run_ranks() -> Callable[..., list[str]]:
    """A function that runs a script on a number of ranks and returns what each of them printed.

    run_ranks(script, ranks, *args, timeout=120, status=0, environment={}): ``script`` is a file of tests/rank_scripts
    or a path. The output of a rank is stdout and stderr together. The test fails, with all output, if the exit
    status of the launcher is not ``status`` (None: any but 0) or if it has not ended after ``timeout`` seconds.
    """
    return _run_ranks


def _run_ranks(
    script: str | Path,
    ranks: int,
    *args: object,
    timeout: float = 120,
    status: int | None = 0,
    environment: dict[str, str] | None = None,
) -> list[str]:
    command = [sys.executable, "-m", "mlxdist", "launch", "-n", str(ranks), "--"]
    command += [sys.executable, str(RANK_SCRIPTS / script), *map(str, args)]
    # A test that hangs should say which operation hangs: the engine's timeout comes before the test's.
    variables = os.environ | {
        "MLXDIST_TIMEOUT": f"{timeout / 2:g}",
        "MLXDIST_TUNING_FILE": "none",
        "MLXDIST_FLIGHT_DIR": "none",
    }
    variables |= environment or {}
    launcher = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = _stop(launcher)
        pytest.fail(f"{script} on {ranks} ranks has not ended after {timeout:g} s; it printed\n{output}")
    ended_well = launcher.returncode != 0 if status is None else launcher.returncode == status
    if not ended_well:
        pytest.fail(
            f"{script} on {ranks} ranks ended with {launcher.returncode}, expected {status}; it printed\n{output}"
        )
    return _by_rank(output, ranks)


def _stop(launcher: subprocess.Popen) -> str:
    """Ends the launcher the polite way, so that it takes its ranks with it."""
    launcher.send_signal(signal.SIGTERM)
    try:
        output, _ = launcher.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        launcher.kill()
        output, _ = launcher.communicate()
    return output


def _by_rank(output: str, ranks: int) -> list[str]:
    """Splits the launcher's output by its [rank] prefix; lines of the launcher itself belong to no rank."""
    outputs = [""] * ranks
    for line in output.splitlines(keepends=True):
        if prefix := _PREFIX.match(line):
            outputs[int(prefix[1])] += line[prefix.end() :]
    return outputs
