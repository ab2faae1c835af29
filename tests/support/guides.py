"""The program of a page of the documentation, as a file that runs."""

import re
from pathlib import Path

__all__ = ["program_of"]


def program_of(page: Path, directory: Path, number: int = 0) -> Path:
    """The block of Python in ``page`` with that number, written to ``directory``."""
    program = directory / "program.py"
    program.write_text(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[number])
    return program
