"""What the tests share: `run_ranks`, which runs a script of tests/rank_scripts under `mlxdist launch`."""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from launching import RANK_SCRIPTS
from resident_ranks import RanksFailed, ResidentRanks

# These scripts leave nothing behind that others would see, so ranks that stay run them: to start Python, MLX and mlx-lm
# takes longer than most of them. Others end processes, look at what a start does, or count from it.
RESIDENT = {
    "batches.py",
    "buffers.py",
    "clip_grad_norm.py",
    "collectives.py",
    "context_attention.py",
    "context_parallel.py",
    "cuts.py",
    "data_parallel.py",
    "equal_inputs.py",
    "every_16_bit_float.py",
    "expert_balance.py",
    "expert_gradients.py",
    "expert_grid.py",
    "expert_low_latency.py",
    "expert_overlap.py",
    "expert_parallel.py",
    "expert_policy.py",
    "expert_training.py",
    "few_tokens.py",
    "fully_shard.py",
    "gradient_guard.py",
    "gradient_order.py",
    "gradients.py",
    "handles.py",
    "kv.py",
    "loading.py",
    "loading_adapters.py",
    "lora.py",
    "mesh.py",
    "mesh_refused.py",
    "message_gradients.py",
    "mixed_precision.py",
    "mlx_fully_shard.py",
    "mlx_graphs.py",
    "mlx_layers.py",
    "mlx_operations.py",
    "nan_guard.py",
    "order.py",
    "ordered_print.py",
    "ordering.py",
    "parallel_attention.py",
    "parallel_mlp.py",
    "parallel_sampling.py",
    "pipeline.py",
    "pipeline_training.py",
    "pull.py",
    "pull_shards.py",
    "router_balance.py",
    "seeds.py",
    "sequences.py",
    "shapes.py",
    "shard_model.py",
    "special_floats.py",
    "split.py",
    "split_block.py",
    "split_models.py",
    "tensor_parallel.py",
    "throughput.py",
    "training.py",
    "value_and_grad.py",
    "vocab_parallel.py",
}
IMPORTED = pytest.StashKey[frozenset[str]]()
BEGIN = pytest.StashKey[float]()
RESIDENT_TIMEOUT = 240  # seconds: the longest of their tests
_resident: dict[int, ResidentRanks] = {}
_PREFIX = re.compile(r"\[ *(\d+)\] ?")
# What ranks print only where something takes long.
_LATE = re.compile(r"[\d:.]+ mlxdist rank \d+ pid \d+ warn deadline: |mlxdist: (loading|streaming): .+ of .+")

# No test judges by the clock of a busy machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares what the processes of the tests inherit: at_start/sitecustomize.py, and signals. In a shell's background
    job Ctrl-C is ignored, under nohup SIGHUP, and the tests send both on purpose."""
    config.stash[BEGIN] = time.monotonic()
    config.pluginmanager.register(_FailuresAtOnce(config))
    at_start, paths = str(Path(__file__).parent / "support" / "at_start"), os.environ.get("PYTHONPATH", "")
    if at_start not in paths.split(os.pathsep):  # as in the workers of xdist
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [at_start, paths]))
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


class _FailuresAtOnce:
    """Prints the first line of a failure at once: a run that is stopped has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")  # not in the workers of xdist
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line(f"\n{report.nodeid}: {crash.message.splitlines()[0] if crash else report.longrepr}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run 1 of N long tests of each file")
    parser.addoption("--choice", default="", help="chooses them: another text, such as a commit, takes others")
    parser.addoption(
        "--begin-within", type=float, metavar="SECONDS", help="later no long test begins; files in any order"
    )
    parser.addoption("--soak-requests", type=int, default=100, metavar="N", help="that each server of the soak gets")
    parser.addoption("--pictures", action="store_true", help="make the pictures of the page in docs/page again")
    parser.addoption(
        "--conversations", type=int, default=60, metavar="N", help="random ones, over all models and ranks"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What is collected stays to the end. To look for garbage in it takes a fifth of the time, and later as much."""
    gc.disable()
    try:
        return (yield)
    finally:
        session.config.stash[IMPORTED] = frozenset(sys.modules)
        gc.freeze()
        gc.enable()


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
    if config.getoption("--begin-within") is not None:  # or it would be the last files each time that are left out
        files = sorted(of_file)
        random.Random(config.getoption("--choice")).shuffle(files)
        items.sort(key=lambda item: files.index(item.path) if item.path in of_file else -1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a slow machine some long tests are left out, rather than that all of them are stopped."""
    limit = item.config.getoption("--begin-within")
    if limit is not None and item.get_closest_marker("long") and time.monotonic() - item.config.stash[BEGIN] > limit:
        pytest.skip(f"long tests have had their {limit:g} s; another choice begins with other files")


@pytest.fixture
def imported_by_collection(request: pytest.FixtureRequest) -> frozenset[str]:
    """The names of the modules that were loaded when all tests of this process were collected."""
    return request.config.stash[IMPORTED]


@pytest.fixture(autouse=True, scope="session")
def folders_of_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sets folders of this session: killed processes leave protection domains in use, which must not meet the next
    one, and the user's tuning file decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True, scope="session")
def resident() -> Iterator[None]:
    """Ranks that stay end well, too, after all that they have run."""
    yield
    usable = [ranks for ranks in _resident if _resident[ranks].is_usable]
    ends = {ranks: of_ranks.close() for ranks, of_ranks in _resident.items()}
    assert not any(ends[ranks][0] for ranks in usable), ends


@pytest.fixture
def run_ranks() -> Callable[..., list[str]]:
    """A function that runs a script on a number of ranks and returns what each of them printed.

    run_ranks(script, ranks, *args, timeout=120, status=0, environment={}, resident=True): ``script`` is a file of
    tests/rank_scripts or a path. The output of a rank is stdout and stderr together. The test fails, with all
    output, if the exit status of the launcher is not ``status`` (None: any but 0) or if it has not ended after
    ``timeout`` seconds. ``resident=False``: ranks of its own, for what breaks the group on purpose.
    """
    return _run_ranks


@pytest.fixture
def run_scenarios() -> Callable[..., None]:
    """A function that runs scenarios of a script as `run_ranks` does. Each rank must print "passed", and nothing else.

    Warnings that a rank waits for another, and progress of loading, do not count: on a busy machine there are some.
    """

    def run(script: str, ranks: int, *args: object, **options: Any) -> None:
        for output in _run_ranks(script, ranks, *args, **options):
            assert [line for line in output.splitlines() if not _LATE.match(line)] == ["passed"], output

    return run


def _run_ranks(
    script: str | Path,
    ranks: int,
    *args: object,
    timeout: float = 120,
    status: int | None = 0,
    environment: dict[str, str] | None = None,
    resident: bool = True,
) -> list[str]:
    if resident and script in RESIDENT and status == 0 and not environment:
        return _by_resident_ranks(str(script), ranks, args, timeout)
    command = [sys.executable, "-m", "mlxdist", "launch", "-n", str(ranks), "--"]
    command += [sys.executable, str(RANK_SCRIPTS / script), *map(str, args)]
    variables = os.environ | _variables(timeout) | (environment or {})
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


def _variables(timeout: float) -> dict[str, str]:
    """A test that hangs should say which operation hangs: the engine's timeout comes before the test's."""
    return {"MLXDIST_TIMEOUT": f"{timeout / 2:g}", "MLXDIST_TUNING_FILE": "none", "MLXDIST_FLIGHT_DIR": "none"}


def _by_resident_ranks(script: str, ranks: int, args: tuple[object, ...], timeout: float) -> list[str]:
    try:
        if ranks in _resident and not _resident[ranks].is_usable:
            _resident.pop(ranks).close()
        if ranks not in _resident:
            _resident[ranks] = ResidentRanks(ranks, os.environ | _variables(RESIDENT_TIMEOUT))
        return _resident[ranks].run(RANK_SCRIPTS / script, [str(arg) for arg in args], timeout)
    except RanksFailed as error:
        _resident.pop(ranks, None)
        pytest.fail(f"{script} on {ranks} ranks that stay: {error}")


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
