"""The program of a page of the documentation, as a file that runs."""

import re
from pathlib import Path

__all__ = ["program_of"]


def program_of(page: Path, directory: Path) -> Path:
    """The first block of Python in ``page``, written to ``directory``."""
    program = directory / "program.py"
    program.write_text(re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1])
    return program
