"""A rank of `mlxdist shard --verify`. Arguments: the model's directory, the plan, and the file that rank 0 writes."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import mlxdist
from mlxdist.nn.models.load import LoadReport, load_sharded
from mlxdist.nn.models.plan import Plan
from mlxdist.nn.models.verify import verify


def main() -> None:
    path, given, result = sys.argv[1:]
    group = mlxdist.init()
    reports: list[LoadReport] = []
    model, _ = load_sharded(path, group=group, plan=Plan.from_json(Path(given).read_text()), on_report=reports.append)
    (report,) = reports
    verification = verify(model, path, group=group)
    if group.rank() == 0:
        found = dataclasses.asdict(verification)
        found["differences"] = [number if math.isfinite(number) else None for number in verification.differences]
        costs = {"bytes_read": report.bytes_read, "bytes_total": report.bytes_total, "seconds": report.seconds}
        found |= {"agrees": verification.agrees, "text": str(verification), "loading": costs}
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
