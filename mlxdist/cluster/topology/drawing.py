"""Hosts and cables as a picture: in the terminal, as DOT for Graphviz, and as SVG."""

import html
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from .topology import Cable, Topology

__all__ = ["as_dot", "as_svg", "as_text"]

_FIRST_LANE = 3  # columns from the boxes to the innermost cable
_LANE = 3  # from one cable to the next
_CORNERS = {"┌": "┐", "└": "┘"}  # of a box
_MAX_MISSING = 12  # more are named, but not drawn


@dataclass
class _Wire:
    """A line of the picture, from one row to another one below it."""

    label: tuple[str, str]
    hosts: tuple[int, int]
    style: str
    dashed: bool = False
    rows: list[int] = field(default_factory=lambda: [0, 0])
    lane: int = 0


def as_text(topology: Topology) -> Text:
    """The graph as text: boxes with a row for each end of a cable, the cables on the right, missing ones dashed."""
    wires = [
        _Wire((_end_label(cable, cable.a.host), _end_label(cable, cable.b.host)), cable.pair, _style(cable))
        for cable in topology.cables
    ]
    if topology.cables and len(topology.gaps) <= _MAX_MISSING:
        wires += [_Wire(("no cable", "no cable"), pair, "red", dashed=True) for pair in topology.gaps]
    rows: list[tuple[str, _Wire | None]] = []  # text, the cable that ends there
    for host, name in enumerate(topology.names):
        rows += [("┌", None), (name, None)]
        for wire in wires:
            if host in wire.hosts:
                end = wire.hosts.index(host)
                wire.rows[end] = len(rows)
                rows.append((f"  {wire.label[end]}", wire))
        rows.append(("└", None))
    _choose_lanes(wires)
    return _render(rows, wires)


def _end_label(cable: Cable, host: int) -> str:
    end = cable.end(host)
    interface = f" {end.interface}" if end.receptacle and end.interface else ""
    return f"{end.port}{interface}" + (f", {cable.speed} Gb/s" if cable.speed is not None else "")


def _style(cable: Cable) -> str:
    return "green" if cable.rdma else "yellow"


def _choose_lanes(wires: Sequence[_Wire]) -> None:
    """Assigns lanes: the shortest cables are innermost, and cables that do not overlap share a lane."""
    lanes: list[list[tuple[int, int]]] = []
    for wire in sorted(wires, key=lambda wire: (wire.rows[1] - wire.rows[0], wire.rows)):
        first, last = wire.rows
        lane = next((i for i, used in enumerate(lanes) if all(last < a or b < first for a, b in used)), len(lanes))
        lanes += [[]] * (lane == len(lanes))
        lanes[lane] = [*lanes[lane], (first, last)]
        wire.lane = lane


def _render(rows: Sequence[tuple[str, _Wire | None]], wires: Sequence[_Wire]) -> Text:
    width = max(len(text) for text, _ in rows) + 4
    right = width + _FIRST_LANE + _LANE * max((wire.lane + 1 for wire in wires), default=0)
    cells = [[(" ", "")] * right for _ in rows]

    def put(line: int, column: int, text: str, style: str = "") -> None:
        cells[line][column : column + len(text)] = [(letter, style) for letter in text]

    for line, (text, wire) in enumerate(rows):
        if text in _CORNERS:
            put(line, 0, text + "─" * (width - 2) + _CORNERS[text])
        else:
            put(line, 0, "│" + " " * (width - 2) + ("├" if wire else "│"))
            put(line, 2, text, wire.style if wire else "bold")
    for wire in wires:
        column = width + _FIRST_LANE + _LANE * wire.lane - 1
        for line in range(wire.rows[0] + 1, wire.rows[1]):
            put(line, column, "╎" if wire.dashed else "│", wire.style)
        for line, corner in zip(wire.rows, "┐┘"):
            put(line, column, corner, wire.style)
    for wire in wires:
        column = width + _FIRST_LANE + _LANE * wire.lane - 1
        for line in wire.rows:
            for x in range(width, column):
                crossed = cells[line][x][0] in "│╎"
                put(line, x, "┼" if crossed else "╌" if wire.dashed else "─", wire.style)
    return Text("\n").join(_line(line) for line in cells)


def _line(cells: Sequence[tuple[str, str]]) -> Text:
    text = Text.assemble(*cells)
    text.rstrip()
    return text


def as_dot(topology: Topology) -> str:
    """The graph as DOT, for Graphviz: `dot -Tpng`."""
    lines = ["graph G {", "  node [shape=rectangle];"]
    lines += [f"  h{i} [label={json.dumps(name, ensure_ascii=False)}];" for i, name in enumerate(topology.names)]
    for cable in topology.cables:
        label = _label(cable, "/", " ")
        color = "" if cable.rdma else ", color=orange"
        lines.append(f"  h{cable.a.host} -- h{cable.b.host} [label={json.dumps(label, ensure_ascii=False)}{color}];")
    lines += [f'  h{a} -- h{b} [style=dashed, color=red, label="missing"];' for a, b in topology.gaps]
    return "\n".join([*lines, "}"]) + "\n"


def _label(cable: Cable, between: str, before_speed: str) -> str:
    ends = between.join(end.interface or end.port for end in (cable.a, cable.b))
    return ends + (f"{before_speed}{cable.speed} Gb/s" if cable.speed is not None else "")


# Colors for a browser's dark mode.
_DARK = """<style>@media (prefers-color-scheme: dark) {
rect {fill: #161b22; stroke: #8b949e} text {fill: #e6edf3} text[stroke] {stroke: #0d1117}
path[stroke="#1a7f37"] {stroke: #3fb950} text[fill="#1a7f37"] {fill: #3fb950}
path[stroke="#bf8700"] {stroke: #d29922} text[fill="#bf8700"] {fill: #d29922}
path[stroke="#cf222e"] {stroke: #f85149} text[fill="#cf222e"] {fill: #f85149}
}</style>"""


def as_svg(topology: Topology) -> str:
    """The graph as SVG, with hosts on a circle. Several cables between two hosts are curves next to each other."""
    count = len(topology.names)
    boxes = [max(110, 8 * len(name) + 24) for name in topology.names]
    radius = max(180, max(boxes) * count / 4) if count > 1 else 0
    middle = radius + max(boxes) / 2 + 40, radius + 60
    places = [
        (middle[0] - radius * math.cos(2 * math.pi * i / count), middle[1] - radius * math.sin(2 * math.pi * i / count))
        for i in range(count)
    ]
    parts = []
    for a, b in itertools.combinations(range(count), 2):
        cables = topology.between(a, b)
        for number, cable in enumerate(cables):
            bend = 44 * (number - (len(cables) - 1) / 2)
            color = "#1a7f37" if cable.rdma else "#bf8700"
            parts.append(_curve(places[a], places[b], bend, color, _label(cable, " – ", ", ")))
        if (a, b) in topology.gaps:
            parts.append(_curve(places[a], places[b], 0, "#cf222e", "missing", dashed=True))
    for name, (x, y), box in zip(topology.names, places, boxes):
        parts.append(
            f'<rect x="{x - box / 2:.1f}" y="{y - 20:.1f}" width="{box}" height="40" rx="6" fill="#fff" stroke="#333"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{y + 5:.1f}" font-weight="bold">{html.escape(name)}</text>')
    size = f'width="{2 * middle[0]:.0f}" height="{2 * middle[1]:.0f}"'
    style = 'font-family="sans-serif" font-size="13" text-anchor="middle"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join([_DARK, *parts]) + "\n</svg>\n"


def _curve(a: tuple, b: tuple, bend: float, color: str, label: str, dashed: bool = False) -> str:
    """The path of a cable from a to b, bent to the left by ``bend``. Its label is at 2/5, where no cables cross."""
    length = math.dist(a, b) or 1
    across = (b[1] - a[1]) / length, (a[0] - b[0]) / length
    control = [(p + q) / 2 + 2 * bend * n for p, q, n in zip(a, b, across)]
    t = 0.4
    x, y = ((1 - t) ** 2 * p + 2 * t * (1 - t) * c + t * t * q for p, c, q in zip(a, control, b))
    dash = ' stroke-dasharray="6 5"' if dashed else ""
    path = f"M{a[0]:.1f} {a[1]:.1f} Q{control[0]:.1f} {control[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" stroke="#fff" stroke-width="4" paint-order="stroke">'
        f"{html.escape(label)}</text>"
    )
