"""`mlxdist launch` on a terminal: colours, progress bars, prompts, Ctrl-C."""

import sys

import pytest
from launching import RANK, Terminal, nothing_left  # noqa: F401


def test_ranks_have_colors_on_a_terminal():
    terminal = Terminal("-n", "2", "--", "echo", "x")
    assert terminal.finish() == 0
    assert sorted(terminal.text.split(b"\r\n")) == [b"", b"\x1b[33m[1] \x1b[0mx", b"\x1b[36m[0] \x1b[0mx"]


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colors_where_they_are_not_wanted(variables):
    terminal = Terminal(
        "-n", "2", "--", sys.executable, "-c", "import os; print(os.environ.get('FORCE_COLOR'))", **variables
    )
    assert terminal.finish() == 0
    assert sorted(terminal.text.split(b"\r\n")) == [b"", b"[0] None", b"[1] None"]


def test_ranks_know_the_size_of_the_terminal():
    program = "import os, shutil; print(shutil.get_terminal_size(), os.environ['FORCE_COLOR'])"
    terminal = Terminal("-n", "1", "--", sys.executable, "-c", program)
    assert terminal.finish() == 0
    assert terminal.lines()[0] == "[0] os.terminal_size(columns=76, lines=24) 1"


def test_ctrl_c_on_a_terminal():
    program = (
        RANK
        + "import time\ntry: print('start', flush=True); time.sleep(30)\nexcept KeyboardInterrupt: print('told', rank)"
    )
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", program)
    terminal.read_until(b"[0] \x1b[0mstart")
    terminal.read_until(b"[1] \x1b[0mstart")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    # The terminal itself shows ^C, wherever the cursor stands.
    assert {"[0] told 0", "[1] told 1"} <= {line.replace("^C", "") for line in terminal.lines()}


def test_a_prompt_is_shown_at_once_and_answered():
    program = RANK + "print(repr(input('name? '))) if rank == 0 else None"
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", program)
    terminal.read_until(b"name? ")
    terminal.type(b"me\n")
    assert terminal.finish() == 0
    assert terminal.lines()[0] == "[0] name? me"  # typed text is echoed by the terminal
    assert "'me'" in terminal.lines()[1]


def test_a_progress_bar_stays_below_the_lines_of_others():
    program = (
        RANK
        + """
import sys, time
for i in range(10):
    if rank == 0:
        sys.stderr.write(f"\\r{i * 10}% of it"); sys.stderr.flush()
    elif i % 3 == 0:
        print("line", i)
    time.sleep(0.05)
if rank == 0:
    time.sleep(0.3)
    sys.stderr.write("\\r100% of it\\n")
"""
    )
    terminal = Terminal("-n", "2", "--", sys.executable, "-c", program)
    assert terminal.finish() == 0
    assert terminal.lines() == ["[1] line 0", "[1] line 3", "[1] line 6", "[1] line 9", "[0] 100% of it", ""]


def test_a_bar_that_erases_its_line_keeps_the_prefix():
    """As rich draws it."""
    program = """
import sys, time
for i in range(3):
    sys.stdout.write(f"\\r\\x1b[2K{i} of 3")
    sys.stdout.flush()
    time.sleep(0.05)
print()
"""
    terminal = Terminal("-n", "1", "--", sys.executable, "-c", program)
    assert terminal.finish() == 0
    assert terminal.lines() == ["[0] 2 of 3", ""]
