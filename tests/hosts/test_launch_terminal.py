"""`mlxdist launch` on a terminal: colours, progress bars, prompts, Ctrl-C."""

import re
import sys

import pytest
from launching import RANK, Terminal, nothing_left  # noqa: F401


def test_ranks_have_colors_on_a_terminal():
    terminal = Terminal("-n", "2", "--", "echo", "x")
    assert terminal.finish() == 0
    assert sorted(terminal.text.split(b"\r\n")) == [b"", b"\x1b[33m[1] \x1b[0mx", b"\x1b[36m[0] \x1b[0mx"]


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colors_where_they_are_disabled(variables):
    terminal = Terminal(
        "-n", "2", "--", sys.executable, "-c", "import os; print(os.environ.get('FORCE_COLOR'))", **variables
    )
    assert terminal.finish() == 0
    assert sorted(terminal.text.split(b"\r\n")) == [b"", b"[0] None", b"[1] None"]


@pytest.mark.parametrize("variables, printed", [({}, b"1"), ({"NO_COLOR": "1"}, b"None")])
def test_ranks_on_hosts_have_colors(variables, printed):
    program = "import os; print(os.environ.get('FORCE_COLOR'))"
    terminal = Terminal("--hosts", "localhost", "--", sys.executable, "-c", program, **variables)
    assert terminal.finish() == 0 and printed in terminal.text, terminal.text


def test_ranks_know_the_size_of_the_terminal():
    program = "import os, shutil; print(shutil.get_terminal_size(), os.environ['FORCE_COLOR'])"
    terminal = Terminal("-n", "1", "--", sys.executable, "-c", program)
    assert terminal.finish() == 0
    assert terminal.lines()[0] == "[0] os.terminal_size(columns=76, lines=24) 1"


def test_ctrl_c_on_a_terminal():
    program = RANK + "try: print('start', flush=True); stay()\nexcept KeyboardInterrupt: print('ended', rank)"
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", program)
    terminal.read_until(b"[0] \x1b[0mstart")
    terminal.read_until(b"[1] \x1b[0mstart")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    # The terminal itself shows ^C, wherever the cursor stands.
    assert {"[0] ended 0", "[1] ended 1"} <= {line.replace("^C", "") for line in terminal.lines()}


def test_a_prompt_is_shown_at_once_and_its_reply_read():
    program = RANK + "print(repr(input('name? '))) if rank == 0 else None"
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", program)
    terminal.read_until(b"name? ")
    terminal.type(b"me\n")
    assert terminal.finish() == 0
    assert terminal.lines() == ["[0] name? me", "[0] 'me'", ""]  # typed text is echoed by the terminal


def test_a_progress_bar_stays_below_the_lines_of_others(tmp_path):
    program = (
        RANK
        + f"ENDED = {str(tmp_path / 'ended')!r}"
        + """
import sys
for i in range(10):
    if rank == 0:
        sys.stderr.write(f"\\r{i * 10}% of it"); sys.stderr.flush()
    elif i % 3 == 0:
        print("line", i)
    late(0.05)
if rank == 1:
    sys.stdout.flush(); open(ENDED, "w").close()
else:
    while not os.path.exists(ENDED): late(0.01)
    late(0.3)  # for the launcher to read what rank 1 has printed
    sys.stderr.write("\\r100% of it\\n")
"""
    )
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", program)
    assert terminal.finish() == 0
    assert terminal.lines() == ["[1] line 0", "[1] line 3", "[1] line 6", "[1] line 9", "[0] 100% of it", ""]


def test_a_bar_that_erases_its_line_keeps_the_prefix():
    """As rich draws it."""
    program = """
import sys
for i in range(3):
    sys.stdout.write(f"\\r\\x1b[2K{i} of 3")
    sys.stdout.flush()
    late(0.05)
print()
"""
    terminal = Terminal("-n", "1", "--", sys.executable, "-c", RANK + program)
    assert terminal.finish() == 0
    assert terminal.lines() == ["[0] 2 of 3", ""]


def test_a_typed_line_reaches_every_rank():
    program = RANK + "print(rank, 'got', repr(input('name? ' if rank == 0 else '')))"
    terminal = Terminal("-n", "3", "--", sys.executable, "-c", program)
    terminal.read_until(b"name? ")
    terminal.type(b"me\n")
    assert terminal.finish() == 0
    first, *others, last = terminal.lines()
    assert (first, last) == ("[0] name? me", "")
    assert sorted(others) == [f"[{rank}] {rank} got 'me'" for rank in range(3)]


def test_every_rank_may_ask():
    """One prompt stands on the screen, the others follow once it was answered."""
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", RANK + "print('got', input('name? '), input('and? '))")
    terminal.read_until(b"name? ")
    terminal.type(b"me\n")
    terminal.read_until(b"and? ")
    terminal.type(b"you\n")
    assert terminal.finish() == 0
    text = "\n".join(terminal.lines())
    assert all(f"[{rank}] " in text for rank in range(2)) and text.count("got me you") == 2


def test_rank_0_alone_has_the_terminal():
    program = RANK + "import sys; print(rank, sys.stdin.isatty(), repr(sys.stdin.readline()))"
    terminal = Terminal("-n", "2", "--stdin", "0", "--", sys.executable, "-c", program)
    terminal.read_until(b"1 False ''")
    terminal.type(b"me\n")
    assert terminal.finish() == 0
    assert b"0 True 'me\\n'" in terminal.text


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_progress_bars_of_several_ranks(ranks):
    """As tqdm draws them, on all ranks at once, with lines in between."""
    program = RANK + (
        "import tqdm\n"
        "for i in tqdm.tqdm(range(20), desc=f'rank {rank}', mininterval=0.01):\n"
        " late(0.02 + 0.01 * rank)\n"
        " if i == 9: tqdm.tqdm.write(f'half of {rank}')\n"
    )
    terminal = Terminal("-n", str(ranks), "--", sys.executable, "-c", program)
    assert terminal.finish(20) == 0
    *shown, last = terminal.lines()
    assert last == ""
    # A bar may be left behind, unfinished, where another rank's came between; a line is never of two.
    for line in shown:
        number, text = re.fullmatch(r"\[(\d)\] (.*)", line).groups()
        assert text.strip() == f"half of {number}" or text.startswith(f"rank {number}:"), shown
        assert len(line) <= 80 and line.count("rank") <= 1, shown
    for rank in range(ranks):
        assert len([line for line in shown if line.startswith(f"[{rank}] rank {rank}: 100%")]) == 1, shown
        assert sum(f"[{rank}] half of {rank}" in line for line in shown) == 1, shown


def test_ctrl_c_over_a_connection():
    """The agent stands for one on another host: it has no terminal, and the signal comes through the connection."""
    program = RANK + (
        "import sys\n"
        "try:\n"
        " print('begins', file=sys.stderr, flush=True)\n"
        " for i in range(10000): print(f'\\r{rank}: {i}%', end='', file=sys.stderr, flush=True); late(0.01)\n"
        "except KeyboardInterrupt: print('\\nended', rank, file=sys.stderr)"
    )
    terminal = Terminal("--hosts", "localhost", "-n", "2", "--", sys.executable, "-c", program)
    terminal.read_until(b"begins", times=2)
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    lines = [line.replace("^C", "").rstrip() for line in terminal.lines()]
    assert {"[0 localhost] ended 0", "[1 localhost] ended 1"} <= set(lines)
    assert lines[-2].startswith("mlxdist launch: interrupted by SIGINT after ") and lines[-1] == ""
    assert not any("Last line" in line for line in lines)


def test_in_the_background_of_a_shell():
    """Reading from the terminal would stop the launcher there; in the foreground again it reads on."""
    job = f"{sys.executable} -m mlxdist launch -n 2 -- {sys.executable} -c 'print(\"got\", input())'"
    terminal = Terminal("-m", "-c", f"{job} & sleep 1; jobs; fg", command=["bash"])
    terminal.read_until(b"Running", 20)
    terminal.type(b"me\n")
    assert terminal.finish(20) == 0
    assert {"[0] got me", "[1] got me"} <= set(terminal.lines())
