"""`mlxdist bench report`: results of a benchmark as one HTML file, with plots, that needs nothing besides itself."""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

import click

from mlxdist.base import tables
from mlxdist.base.atomic_file import atomic_write
from mlxdist.base.output_file import OUTPUT_FILE, is_written
from mlxdist.base.user_path import UserPath

from . import hockney
from .results import comparison, hosts_of, load, notes
from .runner import require_package

__all__ = ["report", "write_report"]

# Plots have no background of their own, and their text the colour of the page's.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.85rem; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #8886; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.refused { color: #d33; font-weight: bold; }
svg { width: 100%; height: auto; }
dt { font-weight: bold; } dd { margin: 0 0 0.5rem 1.5rem; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 0.8rem; }
"""


@click.command()
@click.argument("file", metavar="A.json", type=UserPath(dir_okay=False, path_type=Path))
@click.option("--html", type=OUTPUT_FILE, required=True, help="Where to write the report.")
def report(file: Path, html: Path) -> None:
    """Write a report with plots of what a benchmark has written with --output.

    \b
        mlxdist bench report today.json --html today.html
    """
    require_package("matplotlib", "bench")
    results = load(file)
    sys.exit(0 if is_written(html, lambda path: write_report(results, path)) else 1)


def write_report(results: dict[str, Any], path: Path) -> None:
    from .plots import curves, layers  # only now: matplotlib takes a second to load

    setup = results["setup"]
    title = f"mlxdist bench {results['benchmark']}, {setup['ranks']} ranks on {hosts_of(results)}"
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>',
        f"<h1>{escape(title)}</h1>\n<p>{escape(str(setup.get('begun', '')))}</p>",
        _notes(results),
        "<h2>Operations</h2>",
        *curves(results),
        "<h2>Layers</h2>",
        *layers(results),
        "<h2>All cases, in microseconds</h2>",
        _table(*comparison(results, with_p99=True)),
        *_by_size(results),
        "<h2>Set-up</h2>",
        _setup(setup),
        "</body>\n</html>\n",
    ]
    atomic_write(path, "\n".join(parts))


def _notes(results: dict[str, Any]) -> str:
    lines = []
    for note in notes(results):
        kind = ' class="refused"' if note.startswith("REFUSED") else ""
        lines.append(f"<li{kind}>{escape(note)}</li>")
    share = results["setup"].get("foreign_cpu_share")
    if share is not None:
        lines.append(f"<li>Other processes used {share:.0%} of the CPU meanwhile.</li>")
    return "<ul>\n" + "\n".join(lines) + "\n</ul>"


def _by_size(results: dict[str, Any]) -> list[str]:
    """The lines through the times of operations, made of the cases: only the suite writes them into its files."""
    if not (fits := hockney.fits(results)):
        return []
    table = _table(hockney.COLUMNS, hockney.rows_of(fits))
    return ["<h2>Operations by size</h2>", table, f"<p>{escape(hockney.EXPLAINED)}</p>"]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = f'<div class="wide"><table>\n<thead>{_row("th", columns)}</thead>\n<tbody>'
    return "\n".join([head, *(_row("td", row) for row in rows), "</tbody>\n</table></div>"])


def _row(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _setup(setup: dict[str, Any]) -> str:
    lines = []
    for name, value in setup.items():
        if name == "cases":
            sizes = sorted({line["bytes"] for line in value if "bytes" in line})
            name, value = "sizes", ", ".join(map(tables.size, sizes))
        text = value if isinstance(value, str) else json.dumps(value, indent=2)
        shown = f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)
        lines.append(f"<dt>{escape(name)}</dt><dd>{shown}</dd>")
    return "<dl>\n" + "\n".join(lines) + "\n</dl>"
