"""Writes the table of the fields of requests into docs/serve.md, from the models of mlxdist/serve/api.

Run `python tests/support/field_table.py` when the fields have changed; tests/serve/test_api_fields.py compares.
"""

import textwrap
from pathlib import Path
from typing import Any

from mlxdist.serve.api import ChatRequest, CompletionRequest
from mlxdist.serve.api.fields import Only, Rule, Unused

FILE = Path(__file__).parents[2] / "docs" / "serve.md"
BEGIN, END = "<!-- The next lines: tests/support/field_table.py. -->\n", "<!-- Written until here. -->\n"
KINDS = {"chats": ChatRequest, "completions": CompletionRequest}


def table() -> str:
    """The lists of served and refused fields, in Markdown."""
    rows: dict[type | None, dict[tuple[str, str], list[str]]] = {Unused: {}, Only: {}, None: {}}
    for where, kind in KINDS.items():
        for name, field in kind.model_fields.items():
            rule = next((each for each in field.metadata if isinstance(each, Rule)), None)
            category = type(rule) if isinstance(rule, Unused | Only) else None
            rows[category].setdefault((name, _words(field, rule)), []).append(where)
    lines = {
        category: [
            f"| `{name}` | {where[0] if len(where) == 1 else 'both'} | {words} |"
            for (name, words), where in found.items()
        ]
        for category, found in rows.items()
    }
    unused = textwrap.fill(", ".join(f"`{name}`" for name, _ in rows[Unused]) + ".", 120)
    return "\n".join(
        [
            "| served | of | |",
            "|---|---|---|",
            *lines[None],
            "",
            "These change no answer, and are accepted with any value:",
            unused,
            "",
            "| refused | of | but as; instead |",
            "|---|---|---|",
            *lines[Only],
        ]
    )


def write() -> str:
    """docs/serve.md with the table of today."""
    before, _, rest = FILE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


def _words(field: Any, rule: Rule | None) -> str:
    hint = rule.hint if isinstance(rule, Only) else ""
    literals = ", ".join(f"`{each}`" for each in _literals(field.annotation))
    parts = [rule.words if rule else "", literals, hint, field.description or ""]
    return "; ".join(part for part in parts if part)


def _literals(annotation: Any) -> list[str]:
    inner = getattr(annotation, "__args__", ())
    found = [each for each in inner if isinstance(each, str)]
    return found + [name for each in inner if not isinstance(each, str) for name in _literals(each)]


if __name__ == "__main__":
    FILE.write_text(write())
