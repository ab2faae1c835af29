"""check.py OUTPUT.json [NAME ...]: what mlxdist does with the arrays of MLX's default device, two ranks on it.

Each concern is a program with a time limit of its own, so that one that hangs does not cost the others. The ones that
measure run alone, the others several at a time. The exit status is 1 if one has failed. Logs lie beside the output.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANK_SCRIPTS = HERE.parents[1] / "tests" / "rank_scripts"


@dataclass
class Concern:
    name: str
    program: Path
    arguments: tuple[str, ...] = ()
    seconds: float = 40.0
    ranks: int = 2  # 0: the program starts its ranks itself
    measures: bool = False


def own(name: str, *arguments: str, **how: Any) -> Concern:
    return Concern(name, HERE / f"{name}.py", arguments, **how)


def rank_script(name: str, *arguments: str, **how: Any) -> Concern:
    label = f"{name} {','.join(argument for argument in arguments if '/' not in argument)}".strip()
    return Concern(label, RANK_SCRIPTS / f"{name}.py", arguments, **how)


def concerns(folder: Path) -> list[Concern]:
    return [
        own("streams", seconds=50, measures=True),
        own("chain", seconds=50, measures=True),
        own("layers", seconds=60, measures=True),
        own("tokens", str(folder / "tokens"), seconds=110),
        own("served", str(folder / "served"), seconds=100, ranks=0),
        own("training", seconds=60),
        rank_script("mlx_operations", seconds=60),
        rank_script("mlx_graphs", seconds=60),
        rank_script("parallel_mlp", "dense", "collectives", seconds=60),
        rank_script("split_block", "layers", "counts", seconds=80),
        rank_script("expert_parallel", "thin", seconds=80),
        rank_script("expert_parallel", "gradients", seconds=200),  # compiles many kernels
        rank_script("fully_shard", "like_one_process", seconds=80),
        rank_script("loading", "models", str(folder / "loading"), seconds=60),
        rank_script("late_peers", "loads", "2", "60", str(folder), seconds=30),
    ]


def run(concern: Concern, logs: Path) -> dict[str, Any]:
    limit = concern.seconds * float(os.environ.get("GPU_CHECK_PATIENCE", "1"))  # more on a machine that is busy
    command = [sys.executable, str(concern.program), *concern.arguments]
    if concern.ranks:
        command = [sys.executable, "-P", "-m", "mlxdist", "launch", "-n", str(concern.ranks), "--", *command]
    log = logs / f"{re.sub('[^a-z_]+', '-', concern.name)}.log"
    # Before the limit: a rank that waits says for what.
    variables = os.environ | {"MLXDIST_TIMEOUT": f"{limit * 0.7:g}", "PYTHONFAULTHANDLER": "1"}
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
        )
        try:
            status = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    figures = re.findall(r"FIGURES (\{.*\})", text)
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
    result["figures"] = json.loads(figures[-1]) if figures else {}
    if status != "passed":
        result["last lines"] = text.splitlines()[-25:]
    print(f"{concern.name:45} {status:10} {result['seconds']:6} s", flush=True)
    return result


def machine() -> dict[str, Any]:
    import mlx.core as mx

    from mlxdist.base.gpus import visible_gpus
    from mlxdist.version import __version__

    return {
        "mlxdist": __version__,
        "mlx": vars(mx)["__version__"],
        "device": str(mx.default_device()),
        "device information": {name: str(value) for name, value in mx.device_info().items()},
        "gpus": [str(gpu) for gpu in visible_gpus()],
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }


def main(output: str, *names: str) -> int:
    path = Path(output).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {"MLX_ENABLE_TF32": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.setdefault("MLXDIST_TUNING_FILE", "none")
    report: dict[str, Any] = {"machine": machine(), "concerns": {}}
    with tempfile.TemporaryDirectory() as folder:
        chosen = [one for one in concerns(Path(folder)) if not names or one.name.split()[0] in names]
        (Path(folder) / "loading").mkdir()
        measuring, others = [one for one in chosen if one.measures], [one for one in chosen if not one.measures]
        for one in measuring:
            report["concerns"][one.name] = run(one, path.parent)
            path.write_text(json.dumps(report, indent=1))
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as threads:
            for one, result in zip(others, threads.map(lambda one: run(one, path.parent), others)):
                report["concerns"][one.name] = result
                path.write_text(json.dumps(report, indent=1))
    for name, result in report["concerns"].items():
        print(f"\n{name}: {result['status']}, {result['seconds']} s")
        for what, figure in result["figures"].items():
            print(f"    {what:75} {figure}")
        print(*result.get("last lines", [])[-8:], sep="\n")
    return int(any(result["status"] != "passed" for result in report["concerns"].values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
