"""Debug output: MLXDIST_DEBUG says what of, MLXDIST_DEBUG_FILE where to; the lines of Python and C look alike."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdist.base import logger
from mlxdist.base.environment import DEBUG_SUBSYSTEMS, Environment

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(\d\d:\d\d:\d\d\.\d{6}) mlxdist rank (\d+) pid (\d+) (warn|info|trace) ([a-z]+): (.+)")


def lines(text):
    """(rank, pid, level, subsystem, text) of every line, each of which must be one of debug output."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [(int(m[2]), int(m[3]), m[4], m[5], m[6]) for m in found]


def ranks_wrote(run_ranks, directory, spec, *arguments):
    variables = {"MLXDIST_DEBUG": spec, "MLXDIST_DEBUG_FILE": str(directory / "%h-%r-%p-%%.log")}
    run_ranks("debug.py", 2, *arguments, environment=variables)
    written = {}
    for path in directory.iterdir():
        host, rank, pid, rest = path.name.rsplit("-", 3)
        assert host == socket.gethostname().partition(".")[0] and rest == "%.log"
        written[int(rank)] = lines(path.read_text())
        assert {line[:2] for line in written[int(rank)]} <= {(int(rank), int(pid))}
    assert sorted(written) == [0, 1]
    return written


def test_trace_has_the_lines_of_both_writers(run_ranks, tmp_path):
    for rank, written in ranks_wrote(run_ranks, tmp_path, "trace").items():
        said = [(level, subsystem) for _, _, level, subsystem, _ in written]
        assert ("info", "connection") in said and ("trace", "message") in said
        assert (("info", "rendezvous") in said) == (rank == 0)
        operations = [text for _, _, _, subsystem, text in written if subsystem == "operation"]
        assert operations[0] == "starts all_sum #1 of float32 [3] in group 0, debug.py:12"
        assert re.fullmatch(r"ends all_sum #1 of float32 \[3\] in group 0 after 0\.\d+ s", operations[1])


def test_subsystems_that_are_not_named_only_warn(run_ranks, tmp_path):
    written = ranks_wrote(run_ranks, tmp_path, "trace:connection,rendezvous")
    assert {subsystem for _, _, _, subsystem, _ in written[0]} == {"connection", "rendezvous"}


def test_every_verb_that_sets_up_or_tears_down(run_ranks, tmp_path):
    for written in ranks_wrote(run_ranks, tmp_path, "trace:verbs").values():
        calls = [text.partition(": ")[2] for *_, text in written]
        names = [re.match(r"\w+", call)[0] for call in calls]
        assert names[0] == "open_device" and names[-1] == "close_device"
        assert all(call.endswith(" = 0") for call in calls)
        pairs = {"alloc_pd": "dealloc_pd", "create_cq": "destroy_cq", "create_qp": "destroy_qp", "reg_mr": "dereg_mr"}
        assert all(names.count(made) == names.count(gone) > 0 for made, gone in pairs.items()), names
        for state in ("INIT", "RTR", "RTS"):
            assert sum(f"to {state}, mask 0x" in call for call in calls) == names.count("create_qp"), calls


def test_info_reports_a_lost_message(run_ranks, tmp_path):
    written = ranks_wrote(run_ranks, tmp_path, "info", "loses")
    assert all(level != "trace" for rank in written for _, _, level, _, _ in written[rank])
    again = [text for _, _, _, subsystem, text in written[0] if subsystem == "message"]
    assert again and again[0].endswith("to rank 1 are retransmitted, from number 2 of the eager queue pair 0 on"), again


def test_nothing_is_written_without_cause(run_ranks):
    assert run_ranks("debug.py", 2) == ["", ""]


def test_lines_go_to_stderr_by_default():
    program = "from mlxdist.base import logger; logger.warn('link', 'one'); logger.info('link', 'two')"
    written = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stderr
    assert re.fullmatch(r"[0-9:.]+ mlxdist rank - pid \d+ warn link: one\n", written)


@pytest.mark.parametrize(
    "spec, wanted",
    [
        (None, ["warn link", "warn flight"]),
        ("off", []),
        ("info", ["warn link", "info link", "warn flight", "info flight"]),
        ("info:flight", ["warn link", "warn flight", "info flight"]),
        ("trace:link", ["warn link", "info link", "trace link", "warn flight"]),
    ],
)
def test_levels_and_subsystems(tmp_path, monkeypatch, spec, wanted):
    monkeypatch.setattr(logger, "_output", logger._Output())
    logger.open_output(Environment(rank=3, debug=spec, debug_file=str(tmp_path / "%r")))
    for subsystem in ("link", "flight"):
        for level in (logger.warn, logger.info, logger.trace):
            level(subsystem, "text")
    logger.open_output(Environment())  # closes the file
    assert [f"{level} {subsystem}" for _, _, level, subsystem, _ in lines((tmp_path / "3").read_text())] == wanted


def test_a_file_that_cannot_be_written_is_rejected(run_ranks, tmp_path):
    variables = {"MLXDIST_DEBUG_FILE": str(tmp_path / "missing" / "%r.log")}
    for rank, output in enumerate(run_ranks("debug.py", 2, status=1, environment=variables)):
        assert f"{tmp_path}/missing/{rank}.log cannot be written: No such file or directory" in output


def test_examples_of_the_header_and_the_pages_are_settings():
    pages = [
        *(ROOT / "native").glob("**/*.[ch]"),
        *(ROOT / "docs").glob("**/*.md"),
        ROOT / "mlxdist/base/environment.py",
    ]
    settings = {
        found for page in pages for found in re.findall(r"\b(?:warn|info|trace):[a-z]+(?:,[a-z]+)*", page.read_text())
    }
    assert len(settings) >= 3
    for setting in settings:
        assert Environment.read({"MLXDIST_DEBUG": setting}).debug == setting


def test_every_subsystem_can_be_selected():
    in_c = {
        name
        for path in (ROOT / "native").glob("**/*.c")
        for name in re.findall(r'debug\(\s*DEBUG_\w+,\s*"(\w+)"', path.read_text())
    }
    in_python = {
        name
        for path in (ROOT / "mlxdist").glob("**/*.py")
        for name in re.findall(r'logger\.\w+\(\s*"(\w+)"', path.read_text())
    }
    assert in_c | in_python == set(DEBUG_SUBSYSTEMS)
    page = (ROOT / "docs" / "debugging.md").read_text()
    assert [name for name in DEBUG_SUBSYSTEMS if f"`{name}`" not in page] == []
