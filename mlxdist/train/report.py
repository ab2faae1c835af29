"""Reports of a training while it runs: for people, for programs, and for services that show its progress."""

import dataclasses
import json
import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from mlxdist.base.atomic_file import atomic_write
from mlxdist.base.errors import InvalidArgument, name_ranks
from mlxdist.base.json_reader import parse_json
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group

from .config import TrainConfig
from .throughput import Throughput

__all__ = ["JsonLines", "Report", "TensorBoard", "check_reporters", "is_due"]

_REPORTERS = {"json": "json", "tensorboard": "tensorboardX", "wandb": "wandb", "swanlab": "swanlab"}  # what each needs


class JsonLines:
    """A callback of mlx-lm that writes each report into a file as a line of JSON, for programs. Numbers that are not
    finite are null.

    Args:
        path: the file; lines are added to those that are there.
        iteration: the one from which the training goes on. Lines of later ones are removed, since these run once more.
    """

    def __init__(self, path: str | Path, iteration: int) -> None:
        path = Path(path)
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            atomic_write(path, "".join(line for line in lines if _is_before(line, iteration)))
        # By line: a program that follows the file sees each report at once, and a process that is killed loses none.
        self._file = open(path, "a", buffering=1)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self._file.write(json.dumps({name: _finite(value) for name, value in train_info.items()}) + "\n")

    on_val_loss_report = on_ranks_changed = on_train_loss_report

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """A callback of mlx-lm that writes each number as a scalar for TensorBoard; needs tensorboardX.

    Args:
        directory: where TensorBoard looks.
        iteration: the one from which the training goes on. TensorBoard leaves out the scalars of later ones.
    """

    def __init__(self, directory: str | Path, iteration: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise InvalidArgument("TensorBoard needs tensorboardX: `pip install tensorboardX`") from error
        self._writer = SummaryWriter(str(directory), purge_step=iteration + 1)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        for name, value in train_info.items():
            if name != "iteration":
                self._writer.add_scalar(name, value, train_info["iteration"])

    on_val_loss_report = on_train_loss_report

    def close(self) -> None:
        self._writer.close()


def is_due(iteration: int, before: int, every: int) -> bool:
    """Whether what comes once in ``every`` iterations is due after a step that led from ``before`` to ``iteration``."""
    return iteration // every > before // every


def _is_before(line: str, iteration: int) -> bool:
    """Whether the training does not repeat what a report is about; it repeats the validation at ``iteration``."""
    try:
        report = parse_json(line)
        return report["iteration"] < iteration + ("val_loss" not in report)
    except (KeyError, TypeError, ValueError):  # a line that was not completed
        return False


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_reporters(config: TrainConfig) -> None:
    """Raises InvalidArgument: ``report_to`` names a report that does not exist, or whose package is not installed."""
    if config.prometheus_file and find_spec("prometheus_client") is None:
        raise InvalidArgument("prometheus_file needs prometheus_client: `pip install prometheus-client`")
    for name in _names(config):
        module = _REPORTERS.get(name)
        if module is None:
            raise InvalidArgument(f"report_to {name}: there is no such report; there are {', '.join(_REPORTERS)}")
        if find_spec(module) is None:
            raise InvalidArgument(f"report_to {name} needs {module}: `pip install {module}`")


def _names(config: TrainConfig) -> list[str]:
    return [name.strip() for name in config.report_to.split(",") if name.strip()]


class Report:
    """Lines and a progress bar on rank 0, and the callbacks that ``report_to`` names, which write beside the
    checkpoints, and that of ``prometheus_file``.

    Args:
        config: of the training.
        step: how many steps are done already.
        group: the ranks that train.

    Raises:
        InvalidArgument: on all ranks: a report of ``report_to`` or ``prometheus_file`` cannot be opened.
    """

    def __init__(self, config: TrainConfig, step: int, group: Group) -> None:
        self._config, self._losses = config, list[float]()
        self._last = self._iteration(step)
        self._reported_at, self._save_seconds = time.perf_counter(), 0.0  # and those since then
        self._callbacks: list[Any] = []
        with agreed("train", group):
            if group.rank() == 0:
                self._callbacks = [self._callback(name, self._last) for name in _names(config)]
                if config.prometheus_file:
                    from .prometheus_file import PrometheusFile  # of the extra "lm"

                    per_step = config.grad_accumulation_steps
                    callback = PrometheusFile(config.prometheus_file, config.project_name, self._last, per_step)
                    self._callbacks.append(callback)
        self._console = Console(highlight=False, quiet=group.rank() != 0, soft_wrap=True)
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=config.iters, completed=self._last)

    def __enter__(self) -> "Report":
        self._bar.__enter__()
        self._console.print(" iteration       loss   tokens/s   memory   comm.    MFU  saves", style="bold")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)
        for callback in self._callbacks:
            if hasattr(callback, "close"):
                callback.close()

    def trained(self, step: int, loss: float, learning_rate: float, grad_norm: float, throughput: Throughput) -> None:
        """Takes in a step, and prints a line if one is due. Collective if so: one report of ``throughput``.

        ``grad_norm``: of the gradients of the step, before it is clipped.
        """
        before, self._last = self._last, self._iteration(step)
        iteration = self._last
        self._bar.update(self._task, completed=iteration)
        self._losses.append(loss)
        if not is_due(iteration, before, self._config.steps_per_report) and step < self._config.steps:
            return
        measured = throughput.report() | {"saving": self._share_of_saves()}
        mean = math.fsum(self._losses) / len(self._losses)
        self._losses.clear()
        mfu = f"{measured['mfu']:6.1%}" if "mfu" in measured else "     -"
        self._console.print(
            f"{iteration:10,} {mean:10.4f} {measured['tokens_per_second']:10,.0f} {measured['peak_memory']:6.2f}GB "
            f"{measured['communication']:7.1%} {mfu} {measured['saving']:6.1%}"
        )
        info = {"iteration": iteration, "train_loss": mean, "learning_rate": learning_rate, "grad_norm": grad_norm}
        info |= measured
        for callback in self._callbacks:
            callback.on_train_loss_report(info)

    def validated(self, step: int, loss: float, seconds: float) -> None:
        """Reports an evaluation, which took ``seconds``."""
        iteration = self._iteration(step)
        self._console.print(f"{iteration:10,} {loss:10.4f} of the validation, in {seconds:.1f} s", style="green")
        for callback in self._callbacks:
            callback.on_val_loss_report({"iteration": iteration, "val_loss": loss, "val_time": seconds})

    def ranks_changed(self, step: int, lost: list[int], joined: list[int], ranks: int, repeated: int) -> None:
        """Reports that the training goes on after ``step`` steps with ``ranks`` ranks, and repeats ``repeated`` steps.

        ``lost``, ``joined``: ranks by their numbers at the start of the job.
        """
        iteration = self._iteration(step)
        said = [f"{name_ranks(lost)} {'is' if len(lost) == 1 else 'are'} lost"] if lost else []
        said += [f"{name_ranks(joined)} {'has' if len(joined) == 1 else 'have'} joined"] if joined else []
        steps = f"{repeated} step{'s' * (repeated != 1)}"
        self._console.print(
            f"{iteration:10,} {', '.join(said)}: the training goes on with {ranks} rank{'s' * (ranks != 1)}, and "
            f"repeats {steps}",
            style="yellow",
        )
        info = {"iteration": iteration, "ranks": ranks, "lost": lost, "joined": joined, "repeated_steps": repeated}
        for callback in self._callbacks:
            if hasattr(callback, "on_ranks_changed"):
                callback.on_ranks_changed(info)

    def saved(self, seconds: float) -> None:
        """Takes in the seconds for which the loop has waited for a save."""
        self._save_seconds += seconds
        for callback in self._callbacks:
            if hasattr(callback, "on_save"):
                callback.on_save(seconds)

    def _share_of_saves(self) -> float:
        """The share of the time since the last report that the loop has waited for saves, on this rank."""
        now = time.perf_counter()
        share = self._save_seconds / (now - self._reported_at)
        self._reported_at, self._save_seconds = now, 0.0
        return share

    def _iteration(self, step: int) -> int:
        return step * self._config.grad_accumulation_steps

    def _callback(self, name: str, iteration: int) -> Any:
        config, directory = self._config, Path(self._config.checkpoints.directory)
        directory.mkdir(parents=True, exist_ok=True)
        if name == "json":
            return JsonLines(directory / "reports.jsonl", iteration)
        if name == "tensorboard":
            return TensorBoard(directory, iteration)
        from mlx_lm.tuner.callbacks import get_reporting_callbacks

        settings: Any = dataclasses.asdict(config)  # a dict, whatever mlx-lm's annotation says
        try:
            return get_reporting_callbacks(name, config.project_name or None, str(directory), settings)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"report_to {name}: {error}") from error
