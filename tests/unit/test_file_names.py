"""Files that comments, docstrings and the documentation name are there."""

import ast
import io
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w./*{<$-])(?:[\w-]+/)*[\w-]+\.(?:py|cpp|c|hpp|h|sh)(?![\w./(])")
# Files of other projects and of users.
OTHERS = {"llama.cpp", "netinet/tcp.h", "mpi_test_distributed.py", "program.py", "script.py", "train.py"}
OTHERS |= {"rxe_param.h", "rxe_resp.c", "_built.py", "_native.c", "typing.py", "b.c", "NAME.c", "mine.py"}
OTHERS |= {"layers/__init__.py"}
SUFFIXES = (".py", ".c", ".h", ".cpp", ".md")


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is not a clone of the repository, or git is not installed: it lists the files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def prose(path: Path) -> str:
    """What is written for people in a file."""
    text = (ROOT / path).read_text()
    if not NAME.search(text):
        return ""
    if path.suffix in (".c", ".h", ".cpp"):
        return "\n".join(re.findall(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL))
    if path.suffix == ".py":
        return "\n".join([*_docstrings(text), *_comments(text)])
    return text


def _docstrings(text: str) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))


def _comments(text: str) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return (token.string for token in tokens if token.type == tokenize.COMMENT)


def _is_beside(path: Path, name: str) -> bool:
    """Whether a package that says what its files are has this one."""
    return path.name != "__init__.py" or "/" in name or (ROOT / path.parent / name).exists()


def test_named_files_exist():
    files = tracked()
    there = {name for path in files for name in ("/".join(path.parts[i:]) for i in range(len(path.parts)))}
    written = [path for path in files if path.suffix in SUFFIXES and path.name != "CHANGELOG.md"]
    assert len(written) > 500
    named = {
        (path, name)
        for path in written
        if path.parts[:2] != ("tests", "fixtures")
        for name in NAME.findall(prose(path))
        if name not in OTHERS and Path(name).name not in OTHERS and not name.startswith("mlx/")
    }
    gone = {f"{path}: {name}" for path, name in named if name not in there or not _is_beside(path, name)}
    assert not gone, "\n".join(sorted(gone))


def test_files_of_concepts_exist():
    """Each row of docs/concepts.md: its files are there."""
    rows = re.findall(r"^\| ([^|`]+) \| (`[^|]+) \|$", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE)
    assert len(rows) >= 50
    for concept, listed in rows:
        files = re.findall(r"`([^`]+)`", listed)
        assert files and all((ROOT / file).is_file() for file in files), f"{concept}: {listed}"


def test_names_are_found(tmp_path):
    (file := tmp_path / "module.py").write_text('"""See gone.py, too."""\n# and engine/away.c\nname = "not/this.py"\n')
    assert NAME.findall(prose(file)) == ["gone.py", "engine/away.c"]
