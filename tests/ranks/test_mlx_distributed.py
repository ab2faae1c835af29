"""examples/mlx_distributed.py, which knows only MLX, on mlxdist's transport."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlx_distributed.py"


def losses(text):
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_sums_messages_and_training(run_ranks, ranks):
    assert "mlxdist" not in re.sub(r'"""[\s\S]*?"""', "", EXAMPLE.read_text()), "it is to know only MLX"
    first, *others = run_ranks(EXAMPLE, ranks, "--steps", 101)
    assert f"{ranks} ranks: sum {[float(ranks)] * 4}, gathered {list(range(ranks))}" in first
    assert f"around the ring: {sum(range(ranks))}" in first
    assert 0 <= float(re.search(r"largest difference (\S+)", first).group(1)) < 1e-4
    assert others == [""] * (ranks - 1)
    alone = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "101"], capture_output=True, text=True, timeout=60, check=True
    )
    assert losses(first) == pytest.approx(losses(alone.stdout), rel=2e-2)
    assert len(losses(first)) == 3 and losses(first)[-1] < 0.5 * losses(first)[0]
