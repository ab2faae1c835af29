"""mlxdist.breakpoint: the debugger on one rank, its commands from the launcher's standard input, the others waiting."""

import os
import re
import subprocess
import sys

from launching import LAUNCH, RANK_SCRIPTS


def run(typed, *arguments, ranks=2, status=0):
    """The output of each rank, and what the launcher says; prompts aside."""
    command = [*LAUNCH, "-n", str(ranks), "--", sys.executable, str(RANK_SCRIPTS / "breakpoints.py"), *arguments]
    environment = os.environ | {"MLXDIST_TIMEOUT": "30", "MLXDIST_FLIGHT_DIR": "none"}
    done = subprocess.run(
        command, input="\n".join(typed), stdout=-1, stderr=subprocess.STDOUT, env=environment, text=True, timeout=60
    )
    assert done.returncode == status, done.stdout
    lines = done.stdout.splitlines()
    return [
        [re.sub(r"^(\(Pdb\) )+", "", line[4:]) for line in lines if line.startswith(f"[{rank}] ")]
        for rank in range(ranks)
    ]


def has(line, output):
    assert line in output, output


def test_each_rank_gets_its_commands():
    """Those of rank 1 first, then those of rank 0, whatever has come through the pipes of both. Nothing is too late for
    the deadlines, and what ranks do not name alike is an error of all."""
    typed = ["p 'x', x", "!late(3); x = 41", "c", "p 'y', y", "up", "p rank", "c", ""]
    first, second = run(typed, "differing", "short")
    has("The debugger has rank 1; the other ranks wait. c: all go on.", second)
    assert any(line.endswith("breakpoints.py(16)step()") for line in second), second
    for line in ("('x', 10)", "result 42"):
        has(line, second)
    for line in ("The debugger has rank 0; the other ranks wait. c: all go on.", "('y', 1)", "0", "result 1"):
        has(line, first)


def test_steps():
    """The others go on, and the debugger reads on; what it has read no other rank gets."""
    first, second = run(["n", "n", "n", "p 'y', y", "c", "p 'of rank 0', y", "c", ""])
    has("('y', 11)", second)
    has("('of rank 0', 1)", first)


def test_without_input_the_program_goes_on():
    for output, result in zip(run(["p x"]), ("result 1", "result 11")):
        has("The standard input has ended: the program goes on.", output)
        has(result, output)


def test_quit_ends_the_job():
    first, second = run(["q", ""], status=1)
    assert "result 1" not in first and any("BdbQuit" in line for line in second), (first, second)
