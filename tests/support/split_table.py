"""Writes the table of docs/split-block.md: how SplitModel takes every model file of the installed mlx-lm.

Run `python tests/support/split_table.py` when mlx-lm or SplitModel have changed; tests/nn/test_split_models.py compares.
"""

import re
import sys
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))
import tiny_models

import mlxdist
from mlxdist.nn.models.plan import plan_shards
from mlxdist.nn.models.split_model import _Form, _not_blocks, _wrong_blocks

FILE = Path(__file__).parents[2] / "docs" / "split-block.md"
BEGIN, END = "<!-- Written by tests/support/split_table.py. -->\n", "<!-- End of the table. -->\n"
SEGMENTS = "compiled segments"
NOT_CUT = {"mamba": "its layers are recurrent", "mamba2": "its layers are recurrent"}


def write() -> str:
    """The text of docs/split-block.md, with the table as it is now."""
    text = FILE.read_text()
    return text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :]


def table() -> str:
    found: dict[tuple[str, str], list[str]] = {}
    for name in tiny_models.model_files():
        found.setdefault(_taken(name), []).append(name)
    lines = ["", "| model files | layers | why |", "|---|---|---|"]
    order = sorted(found.items(), key=lambda item: (item[0][0] != SEGMENTS, item[0][0], -len(item[1]), item[1]))
    lines += [f"| {', '.join(names)} | {how} | {why} |" for (how, why), names in order]
    return "\n".join([*lines, "", ""])


def _taken(name: str) -> tuple[str, str]:
    if why := (tiny_models.NOT_IMPORTED | tiny_models.NOT_COMPARED).get(name):
        return "not tried", why
    mx.set_default_device(mx.cpu)
    model = tiny_models.build(name)
    if not plan_shards(model, tp=2).sharded:
        return "refused", f"`shard_model` finds nothing in it that it can shard: {NOT_CUT[name]}"
    why = _not_blocks(model) or _wrong_blocks(model, _Form(None, None, mlxdist.init()))
    return (SEGMENTS, "") if why is None else ("sharded by `shard_model`", _shortened(why))


def _shortened(why: str) -> str:
    """Without the class, which only one file has."""
    why = why.split(": ", 1)[1].split(": it is not shaped")[0].split(": the layer computes")[0]
    return re.sub(r"^\w+ (has no|is not called|differs)", r"the layer \1", re.sub(r" by [\d.]+ of its norm", "", why))


if __name__ == "__main__":
    FILE.write_text(write())
