"""`mlxdist.train.train` in a program: a setting that is wrong on one rank, and the same result on all ranks.

Arguments: a folder of tests/support/training_folder.py.
"""

import json
import sys
from pathlib import Path

import numpy as np

import mlxdist
from mlxdist import train

folder = Path(sys.argv[1])
group = mlxdist.init()
settings = {
    "model": str(folder / "qwen3"), "data": str(folder / "data"), "weights": "random", "iters": 3, "batch_size": 4,
    "val_batches": 1, "steps_per_report": 1, "seed": 7, "report_to": "json",
}  # fmt: skip
last = group.size() - 1
try:
    train.train(settings | ({"iters": 0} if group.rank() == last else {}))
except mlxdist.InvalidArgument as error:
    assert "iters is 0, not a whole number from 1" in str(error), error
else:
    raise AssertionError("the last rank's setting is wrong")

result = train.train(settings)
results = mlxdist.all_gather(np.array([[result.step, result.loss, result.validation_loss]]))
assert (results == results[0]).all(), results
reports = [json.loads(line) for line in Path("checkpoints/reports.jsonl").read_text().splitlines()]
assert result.loss == [report["train_loss"] for report in reports if "train_loss" in report][-1]
assert result.validation_loss == [report["val_loss"] for report in reports if "val_loss" in report][-1]
assert result.step == 3 and result.output == Path("trained")
assert (Path("trained") / "model.safetensors").exists()
