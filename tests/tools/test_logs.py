"""`mlxdist logs`: what the ranks have printed, from the files of `mlxdist launch --log-dir`."""

import json
import re
import sys
import tracemalloc

import pytest
from click.testing import CliRunner
from launching import Terminal, python

from mlxdist.cli import commands
from mlxdist.launch.log_files import find_logs

PROGRAM = """
import sys
for step in range(30):
    print(f'\\x1b[1mstep\\x1b[0m {step} of rank {rank}')
print('0 %\\r50 %\\r100 %', end='', file=sys.stderr)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs") / "of a job"
    assert python(2, PROGRAM, options=["--log-dir", logs]).returncode == 0
    return logs


def show(*words):
    done = CliRunner().invoke(commands, ["logs", *map(str, words)])
    return done.exit_code, done.output.splitlines()


def test_the_last_lines_of_each_file(directory):
    last = lambda rank, count: [f"[{rank} out] step {step} of rank {rank}" for step in range(30 - count, 30)]
    assert show(directory) == (0, [*last(0, 10), "[0 err] 100 %", *last(1, 10), "[1 err] 100 %"])
    assert show(directory, "--last", 2, "--rank", 1) == (0, [*last(1, 2), "[1 err] 100 %"])
    assert show(directory, "--last", 100, "--rank", "0")[1][:2] == [
        "[0 out] step 0 of rank 0",
        "[0 out] step 1 of rank 0",
    ]


def test_lines_that_match(directory):
    assert show(directory, "--grep", "step 1?2 of") == (
        0,
        [f"[{rank} out] step {step} of rank {rank}" for rank in (0, 1) for step in (2, 12)],
    )
    assert show(directory, "--grep", "step 1", "--last", 1, "--rank", 0) == (0, ["[0 out] step 19 of rank 0"])
    assert show(directory, "--grep", "50 %") == (1, [])  # which the progress bar has replaced
    code, (line,) = show(directory, "--json", "--grep", "step 29", "--rank", 1)
    assert code == 0 and json.loads(line) == {"rank": "1", "stream": "out", "text": "step 29 of rank 1"}


def test_colors_on_a_terminal(directory):
    terminal = Terminal("-m", "mlxdist", "logs", directory, "--grep", "p 29", "--rank", "1", command=[sys.executable])
    assert terminal.finish() == 0
    assert terminal.text.strip() == b"\x1b[33m[1 out] \x1b[0mste\x1b[1;31mp 29\x1b[0m of rank 1"


@pytest.mark.parametrize(
    "words, error",
    [
        (["--rank", "7"], "--rank 7: there are files of ranks 0, 1"),
        (["--grep", "("], "--grep '(' is no regular expression"),
        (["--last", "0"], "0 is not in the range"),
    ],
)
def test_what_is_rejected(directory, words, error):
    code, lines = show(directory, *words)
    assert code == 2 and error in "\n".join(lines)


def test_a_directory_without_logs(tmp_path):
    (tmp_path / "other.out").touch()
    (tmp_path / "rank-0.out").mkdir()
    code, lines = show(tmp_path)
    assert code == 2 and "has no files of `mlxdist launch --log-dir`" in lines[-1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("length", [1, 70_000])
def test_lines_are_those_of_tail(tmp_path, count, end, length):
    lines = [letter * length for letter in "abcd"]
    (tmp_path / "rank-0.out").write_text("\n".join(lines) + end)
    (log,) = find_logs(tmp_path)
    expected = [line if length == 1 else line[:4096] + "..." for line in lines] + [""] * (end == "\n\n")
    assert list(log.lines(last=count)) == expected[-count:]
    assert list(log.lines(last=count, pattern=re.compile(""))) == expected[-count:]


def test_large_files_take_little_memory(tmp_path):
    with (tmp_path / "rank-0.out").open("wb") as file:
        file.write(b"x" * (32 << 20) + b"\n")
        file.write(b"50 %\r" * (4 << 20))
        file.write(b"100 %\n\x1b]0;title\x07bell\n" + b"\xff\n")
    (log,) = find_logs(tmp_path)
    for options in ({"last": 4}, {"pattern": re.compile("")}):
        tracemalloc.start()
        found = list(log.lines(**options))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == ["x" * 4096 + "...", "100 %", "?]0;title?bell", "\ufffd"] and peak < 4 << 20
