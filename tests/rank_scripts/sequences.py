"""One rank of test_sequences.py: carries out a program. Argument: a file with the program as JSON."""

import json
import sys
from pathlib import Path

from programs import carry_out, inject

program = json.loads(Path(sys.argv[1]).read_text())
if program["faults"]:
    inject(program["faults"])
carry_out(program["steps"])
print(f"{len(program['steps'])} steps are exact")
