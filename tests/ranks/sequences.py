"""One rank of tests/test_sequences.py: carries out a program. Argument: a file with the program as JSON."""

import json
import sys
from pathlib import Path

from programs import carry_out, world

from mlxdist.native import check, lib

program = json.loads(Path(sys.argv[1]).read_text())
if program["faults"]:
    check(lib.mlxdist_group_inject(world._native, f"{program['faults']},seed={world.rank()}".encode()))
carry_out(program["steps"])
print(f"{len(program['steps'])} steps are exact")
