"""Text stubs of dynamic libraries (.tbd, version 4), as Apple's SDK has them: the names that a library exports."""

import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["is_stub", "read_stub", "write_stub"]

_HEAD = "--- !tapi-tbd"
_BLOCK = re.compile(r"-\s+targets:\s*\[([^\]]*)\](.*?)(?=\n\s*-\s+targets:|\n\S|\Z)", re.DOTALL)
_NAMES = re.compile(r"\b(?:symbols|weak-symbols|thread-local-symbols):\s*\[([^\]]*)\]")


def is_stub(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD.encode()


def read_stub(path: Path) -> tuple[str, set[str]]:
    """The install name of a library, and what it exports on arm64 (or arm64e: that of the system's libraries)."""
    text = path.read_text()
    exports = set()
    for targets, block in _BLOCK.findall(text):
        if re.search(r"\barm64e?-macos\b", targets):
            for names in _NAMES.findall(block):
                exports |= {name.strip().strip("'\"") for name in names.split(",")}
    install_name = re.search(r"^install-name:\s*'?([^'\n]+)", text, re.MULTILINE)
    return install_name[1] if install_name else "", exports - {""}


def write_stub(path: Path, install_name: str, exports: Collection[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ", ".join(f"'{name}'" for name in sorted(exports))
    path.write_text(
        f"{_HEAD}\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{install_name}'\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {names} ]\n...\n"
    )
