"""The file of `mlxdist doctor --report`: Markdown for people, with everything once more as one JSON block at its end.

It is never larger than MAX_BYTES: each section has a limit, and notes where it is cut.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .redact import Redactor

__all__ = ["MAX_BYTES", "Section", "fenced", "table", "write_document"]

MAX_BYTES = 1_000_000
_TEXT_BYTES, _SECTION_BYTES = 550_000, 100_000  # of all sections, and of one
_ERROR_BYTES = 8_000
_JSON_BYTES = 300_000
_FENCE = "~~~~"
_HEAD = """# mlxdist doctor report

Made by `mlxdist doctor --report`. Names of hosts and users, secrets, serial numbers, UUIDs, MAC addresses and public
addresses are placeholders such as `<host-1>`; equal placeholders stand for equal values. Please look through this file
before you share it.
"""


@dataclass
class Section:
    """A section. ``text``: Markdown. ``data``: the same for programs. ``error``: why it is incomplete, or ""."""

    name: str
    title: str
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


def fenced(text: str) -> str:
    """A block of Markdown with the text unchanged, whatever it contains."""
    return f"{_FENCE}text\n{text.rstrip().replace(_FENCE, '~~~')}\n{_FENCE}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def write_document(sections: Sequence[Section], redactor: Redactor, notes: Sequence[str] = ()) -> str:
    """All sections, redacted and cut to their limits. ``notes``: remarks about the report as a whole."""
    for section in sections:
        redactor.learn([section.text, section.data, section.error])
    parts = [_HEAD, *(f"\n**{redactor.text(note)}**\n" for note in notes), "\n", _contents(sections), "\n"]
    count = max(1, len(sections))
    parts += [_print(section, redactor, min(_SECTION_BYTES, _TEXT_BYTES // count)) for section in sections]
    data = {section.name: _bounded(_plain(section, redactor), _JSON_BYTES // count) for section in sections}
    block = json.dumps({"mlxdist_report": 1, "sections": data}, indent=1).replace(_FENCE, "~~~")
    return "".join(parts) + f"\n## For programs\n\n{_FENCE}json\n{block}\n{_FENCE}\n"


def _contents(sections: Sequence[Section]) -> str:
    rows = [(section.title, f"{section.seconds:.1f} s", "incomplete" if section.error else "") for section in sections]
    return table(("section", "took", ""), rows)


def _print(section: Section, redactor: Redactor, most: int) -> str:
    text = redactor.text(section.text)
    error = f"\nIncomplete: {redactor.text(section.error)}\n" if section.error else ""
    return f"\n## {section.title}\n{_cut(error, _ERROR_BYTES)}\n{_cut(text, most)}"


def _plain(section: Section, redactor: Redactor) -> dict[str, Any]:
    found = {"error": section.error, "seconds": round(section.seconds, 1), "data": section.data}
    return redactor.value(found)


def _cut(text: str, most: int) -> str:
    """The beginning and the end of a long text, with a line between them that says how much was cut."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return text
    head, tail = most * 2 // 3, most // 3
    kept = data[:head].decode(errors="ignore"), data[-tail:].decode(errors="ignore")
    note = f"[... {len(data) - head - tail} bytes were cut here ...]"
    # A cut inside a fenced block has to close the block before the note, and to open it again after that.
    is_open = len(re.findall(rf"^{_FENCE}", kept[0], re.MULTILINE)) % 2
    closes = len(re.findall(rf"^{_FENCE}", kept[1], re.MULTILINE)) % 2
    before, after = (f"\n{_FENCE}\n" * is_open, f"\n{_FENCE}text\n" * closes)
    return f"{kept[0]}{before}\n{note}\n{after}{kept[1]}"


def _bounded(value: Any, most: int) -> Any:
    """The value with texts and lists that are shortened step by step, until it fits."""
    for texts, items in ((4000, 400), (1000, 100), (200, 30), (80, 8)):
        shorter = _shorten(value, texts, items)
        if len(json.dumps(shorter, indent=1)) <= most:
            return shorter
    return {"cut": "this section was too large"}


def _shorten(value: Any, texts: int, items: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= texts else f"{value[:texts]} [{len(value) - texts} characters were cut]"
    if isinstance(value, dict):
        kept = {key: _shorten(inner, texts, items) for key, inner in list(value.items())[:items]}
        return kept if len(value) <= items else kept | {"cut": f"{len(value) - items} entries"}
    if isinstance(value, list):
        shorter = [_shorten(inner, texts, items) for inner in value[:items]]
        return shorter if len(value) <= items else [*shorter, f"[{len(value) - items} entries were cut]"]
    return value


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
