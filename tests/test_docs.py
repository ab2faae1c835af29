"""What the documentation shows is what happens."""

import re
from pathlib import Path

import pytest

from mlxdist.environment import ALGORITHMS, VARIABLES
from mlxdist.native import ffi, lib

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_program_of_the_readme(run_ranks, tmp_path):
    """Its code runs, and prints what is shown below it."""
    readme = (ROOT / "README.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1])
    for rank, output in enumerate(run_ranks(program, 2)):
        assert f"    [{rank}] {output}" in readme


def test_the_page_of_variables_is_complete():
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert rows == [(variable.name, variable.meaning, variable.default) for variable in VARIABLES]


def test_the_defaults_shown_are_those_of_the_engine():
    options = ffi.new("mlxdist_options *")
    lib.mlxdist_default_options(options)
    shown = {variable.name: variable.default for variable in VARIABLES}
    for name, _ in ffi.typeof("mlxdist_options").fields:
        default = getattr(options, name)
        if name in ("wires", "host", "links"):
            assert default == ffi.NULL
            continue
        if name in ("reliable", "has_key", "key"):  # MLXDIST_QP and MLXDIST_SECRET
            assert not any(bytes(ffi.buffer(ffi.addressof(options, name)))) and shown["MLXDIST_QP"] == "uc"
            continue
        if name == "entry_timeout":  # MLXDIST_TIMEOUT is for both; the text below the table has this default
            assert default == 30 * 60
            continue
        if name == "soft_profile":
            assert shown["MLXDIST_SOFT_PROFILE"] == ffi.string(default).decode()
            continue
        text = ALGORITHMS[default] if name == "algo" else f"{default:.0f}"
        assert shown[f"MLXDIST_{name.upper()}"] == text, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_links_exist(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"make ([a-z][a-z-]*)`", text) + re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)
    for target in set(targets):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} shows make {target}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
